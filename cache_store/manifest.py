"""The manifest of a snapshot: what it is, what must agree before it is used, and a checksum of every record.

The file is ``{"xxh3":"<16 hex digits>","body":{...}}``; the checksum is over the body's bytes, and the
file must be exactly what the writer would write for that body. `cache_store.stored` reads it.
"""

from dataclasses import asdict
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Meta

from cache_store.keys import SnapshotKey
from cache_store.layout import LAYOUT_VERSION, KVLayout, KVType
from cache_store.segments import WHOLE, BlockTable, Count, Offset, Segments
from cache_store.shards import FORMAT_VERSION
from cache_store.slots import SlotCounts

MANIFEST_NAME = "manifest.json"
SEAL_TAG_NBYTES, SEAL_SALT_NBYTES = 16, 16


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The top-k logits (fp32) at the last token, largest first, and the tokens they belong to."""

    token_ids: tuple[Annotated[int, Meta(ge=0, le=1 << 31)], ...]
    logits: tuple[float, ...]


class LayoutFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `KVLayout` with the version of the byte layout."""

    n_layers: Annotated[int, Meta(ge=1, le=4096)]
    n_kv_heads: Annotated[int, Meta(ge=1, le=4096)]
    head_dim: Annotated[int, Meta(ge=32, le=4096, multiple_of=32)]
    kv_type: KVType
    block_tokens: Annotated[int, Meta(ge=1, le=65536)]
    layout_version: int = LAYOUT_VERSION

    @classmethod
    def of(cls, layout: KVLayout) -> "LayoutFields":
        return cls(**asdict(layout))

    def layout(self) -> KVLayout:
        return KVLayout(self.n_layers, self.n_kv_heads, self.head_dim, self.kv_type, self.block_tokens)


class SegmentFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`Segments` of a document that has several."""

    segment_tokens: Count
    sink_tokens: Offset

    @classmethod
    def of(cls, segments: Segments) -> "SegmentFields | None":
        return cls(segments.segment_tokens, segments.sink_tokens) if segments != WHOLE else None


class ResidentRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows picked from a document stand where they stood there; this is where its last token does."""

    last_position: Offset


class Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of an encrypted snapshot (`cache_store.sealing`): the id of the key, the salt, and the tags of the records,
    block-major as their checksums, and of the tokens of each shard, which have a checksum here too. `canary`: sealed,
    with its tag, or empty. Checksums are of sealed bytes."""

    key_id: str
    salt: bytes
    tags: bytes
    token_tags: bytes
    token_checksums: bytes
    canary: bytes = b""


class SealedRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Records from `first_block` on, and the canary, are sealed with another salt: the build was taken up there."""

    first_block: Offset
    salt: bytes


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of a manifest.

    `next_position` is where a question starts. `checksums`: little-endian xxh3-64 of each record, block-major
    ``[n_blocks, n_layers]``. `shard_nbytes`: length of each shard. `page_map`: pages as [first, last) token
    ranges. `retention`: how a document of several segments is cut. For resident rows and slots tokens are rows, and
    the positions of the block table count rows.
    """

    format_version: int = FORMAT_VERSION
    owner_id: str
    kind: str
    id: str
    payload: str = "blocks"
    fingerprint: dict[str, str]
    layout: LayoutFields
    n_tokens: Count
    token_digest: str
    context_digest: str
    next_position: Offset
    blocks: BlockTable
    shard_nbytes: list[Count]
    checksums: bytes
    created_at: float
    page_map: list[tuple[Offset, Offset]] | None = None
    retention: SegmentFields | None = None
    sections: dict[str, msgspec.Raw] = {}

    @property
    def key(self) -> SnapshotKey:
        return SnapshotKey(self.owner_id, self.kind, self.id)

    @property
    def n_blocks(self) -> int:
        return len(self.blocks.n_tokens)

    @property
    def first_position(self) -> int:
        """Position of the first token: 0 for a document, where a turn goes on from for a turn."""
        return self.blocks.first_position[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(self.shard_nbytes)

    @property
    def canary(self) -> Canary | None:
        raw = self.sections.get("canary")
        return None if raw is None else msgspec.json.decode(raw, type=Canary)

    @property
    def resident_rows(self) -> ResidentRows | None:
        raw = self.sections.get("resident")
        return None if raw is None else msgspec.json.decode(raw, type=ResidentRows)

    @property
    def slots(self) -> SlotCounts | None:
        raw = self.sections.get("slots")
        return None if raw is None else msgspec.json.decode(raw, type=SlotCounts)

    @property
    def sealed(self) -> Sealed | None:
        raw = self.sections.get("sealed")
        return None if raw is None else msgspec.json.decode(raw, type=Sealed)

    @property
    def sealed_runs(self) -> list[SealedRun]:
        raw = self.sections.get("sealed_runs")
        return [] if raw is None else msgspec.json.decode(raw, type=list[SealedRun])

    @property
    def segments(self) -> Segments:
        """How the tokens stand; that of a single segment is `WHOLE`. Raises ValueError for what cannot be."""
        stored = self.retention
        return WHOLE if stored is None else Segments(stored.segment_tokens, stored.sink_tokens)

    @property
    def last_position(self) -> int:
        """Where the last token stands."""
        rows = self.resident_rows
        return self.first_position + self.segments.last_position(self.n_tokens) if rows is None else rows.last_position

    def checksum_table(self) -> npt.NDArray[np.uint64]:
        """``[n_blocks, n_layers]``."""
        return np.frombuffer(self.checksums, "<u8").reshape(self.n_blocks, self.layout.n_layers)


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of the manifest's file."""
    return enveloped(msgspec.json.encode(manifest))


def enveloped(body: bytes) -> bytes:
    """A body with its checksum."""
    return b'{"xxh3":"%s","body":%s}\n' % (xxhash.xxh3_64_hexdigest(body).encode(), body)
