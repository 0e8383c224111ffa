"""Where each record lies: a snapshot's shards, known in full before the first block is computed.

A shard is a valid safetensors file of at most 64 MiB: ``tokens`` (int32) and one uint8 tensor
``layer.NNN`` per layer with the records of the shard's blocks one after another. A shard holds whole
blocks, or, where one block is too large, some layers of one block. Its header follows from the key, the
fingerprint, the layout and the number of tokens alone, so a reader compares it instead of parsing it.
"""

import json
from dataclasses import dataclass

import xxhash

from cache_store.keys import EntryName
from cache_store.layout import KVLayout

FORMAT_VERSION = 1
SHARD_NBYTES = 64 << 20
_HEADER_ROOM = 512 << 10
_ALIGN = 64
TOKEN_NBYTES = 4


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard file: blocks [first_block, + n_blocks) of layers [first_layer, + n_layers)."""

    index: int
    first_block: int
    n_blocks: int
    first_layer: int
    n_layers: int
    first_token: int
    n_tokens: int
    layer_nbytes: int
    header: bytes

    @property
    def file_name(self) -> str:
        return f"shard-{self.index:04d}.safetensors"

    @property
    def end_block(self) -> int:
        """The block after the last one."""
        return self.first_block + self.n_blocks

    @property
    def tokens_offset(self) -> int:
        return len(self.header)

    @property
    def nbytes(self) -> int:
        return self.layer_offset(self.first_layer + self.n_layers)

    def layer_offset(self, layer: int) -> int:
        """File offset of the records of `layer`."""
        records = len(self.header) + self.n_tokens * TOKEN_NBYTES
        return records + (layer - self.first_layer) * self.layer_nbytes


@dataclass(frozen=True, slots=True)
class Geometry:
    """All shards of a snapshot, and the checksum of each of its records."""

    name: EntryName
    layout: KVLayout
    n_tokens: int
    shards: tuple[Shard, ...]
    seed: int

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def n_blocks(self) -> int:
        return self.layout.n_blocks(self.n_tokens)

    def block_length(self, block: int) -> int:
        """Tokens in a block."""
        return min(self.layout.block_tokens, self.n_tokens - block * self.layout.block_tokens)

    def shards_of(self, block: int) -> list[Shard]:
        return [s for s in self.shards if s.first_block <= block < s.end_block]

    def record_offset(self, shard: Shard, block: int, layer: int) -> int:
        """File offset of the record of a block and a layer within its shard."""
        before = (block - shard.first_block) * self.layout.record_nbytes(self.layout.block_tokens)
        return shard.layer_offset(layer) + before

    def checksum(self, record: bytes | memoryview, block: int, layer: int) -> int:
        """xxh3-64 of a record, bound to its key, fingerprint, block and layer: moved bytes do not pass."""
        seed = (self.seed + block * self.layout.n_layers + layer) & 0xFFFFFFFFFFFFFFFF
        return xxhash.xxh3_64_intdigest(record, seed)


def plan_shards(name: EntryName, layout: KVLayout, n_tokens: int, *, shard_nbytes: int = SHARD_NBYTES) -> Geometry:
    """The shards of a snapshot of `n_tokens` tokens, none above `shard_nbytes` unless a single record is."""
    room = max(1, shard_nbytes - min(_HEADER_ROOM, shard_nbytes // 8))
    record = layout.record_nbytes(layout.block_tokens)
    blocks = max(1, room // (record * layout.n_layers))
    layers = layout.n_layers if record * layout.n_layers <= room else max(1, room // record)
    shards: list[Shard] = []
    for first_block in range(0, layout.n_blocks(n_tokens), blocks):
        for first_layer in range(0, layout.n_layers, layers):
            span = (first_layer, min(layers, layout.n_layers - first_layer))
            shards.append(_shard(name, layout, n_tokens, len(shards), first_block, blocks, *span))
    seed = xxhash.xxh3_64_intdigest(f"{name.key.text}/{name.fingerprint_digest}".encode())
    return Geometry(name, layout, n_tokens, tuple(shards), seed)


def _shard(
    name: EntryName,
    layout: KVLayout,
    n_tokens: int,
    index: int,
    first_block: int,
    blocks: int,
    first_layer: int,
    n_layers: int,
) -> Shard:
    first_token = first_block * layout.block_tokens
    tokens = min(blocks * layout.block_tokens, n_tokens - first_token)
    lengths = layout.block_lengths(tokens)
    layer_nbytes = sum(layout.record_nbytes(n) for n in lengths)
    header = _header(name, index, tokens, range(first_layer, first_layer + n_layers), layer_nbytes)
    return Shard(index, first_block, len(lengths), first_layer, n_layers, first_token, tokens, layer_nbytes, header)


def _header(name: EntryName, index: int, n_tokens: int, layers: range, layer_nbytes: int) -> bytes:
    end = n_tokens * TOKEN_NBYTES
    metadata = {
        "format": f"preread-snapshot-{FORMAT_VERSION}",
        "key": name.key.text,
        "fingerprint": name.fingerprint_digest,
        "shard": str(index),
    }
    entries: dict[str, object] = {
        "__metadata__": metadata,
        "tokens": {"dtype": "I32", "shape": [n_tokens], "data_offsets": [0, end]},
    }
    for layer in layers:
        offsets = [end, end + layer_nbytes]
        entries[f"layer.{layer:03d}"] = {"dtype": "U8", "shape": [layer_nbytes], "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    return len(text).to_bytes(8, "little") + text
