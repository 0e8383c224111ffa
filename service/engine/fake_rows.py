"""The KV rows of `FakeRunner`: bytes of the codec's record layout, made from tokens by hashing.

A row of a head is ``k_codes | k_scales | v_codes | v_scales`` of one token. The decoded key is a pattern of +1 and -1
that follows from token, layer and head, so that a product with the same token's pattern is `head_dim`, and with
another's near 0. The value begins with a hash that chains over everything before the token, then the token and its
position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from cache_store.layout import KVLayout

_CHAIN_NBYTES = 8
_HEADER_NBYTES = _CHAIN_NBYTES + 8
_ONE = np.array([1], np.float16).view(np.uint8)


def key_pattern(token: int, layer: int, head: int, head_dim: int) -> np.ndarray:
    """The decoded key of a token, float32 ``[head_dim]``, of +1 and -1."""
    seed, words = layer * 4096 + head, -(-head_dim // 32)
    bits = b"".join(
        xxhash.xxh32_intdigest(int(token).to_bytes(8, "little"), seed=seed + (i << 20)).to_bytes(4, "little")
        for i in range(words)
    )
    return np.unpackbits(np.frombuffer(bits, np.uint8))[:head_dim].astype(np.float32) * 2 - 1


@dataclass(slots=True)
class FakeDocument:
    """Rows of bytes ``[n_layers, n_kv_heads, capacity, row]``, and how many tokens are complete. `slots`: rows of each
    head's own by layer and head, None until they are loaded."""

    rows: np.ndarray
    loaded: list[int]
    n_tokens: int = 0
    next_position: int = 0
    last_position: int = -1
    prefix: int = 0
    digest: int = 0
    freed: bool = False
    slots: list[list[np.ndarray] | None] = field(default_factory=list)
    slot_counts: list[list[int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.rows.shape[-1] * sum(map(sum, self.slot_counts))


@dataclass(slots=True)
class FakeTail:
    """`fetched`: the run [first, last) of its rows that are a document's. `answered`: which token of an answer follows
    its last row, -1 where none was asked for."""

    rows: np.ndarray
    n_tokens: int = 0
    answered: int = -1
    fetched: tuple[int, int] = (0, 0)

    @property
    def n_fetched(self) -> int:
        return self.fetched[1] - self.fetched[0]

    def cut(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens` rows."""
        self.answered = max(self.answered - (self.n_tokens - n_tokens), -1)
        self.n_tokens = n_tokens
        self.fetched = (min(self.fetched[0], n_tokens), min(self.fetched[1], n_tokens))


class FakeRows:
    """Makes and reads rows ``[n_layers, n_kv_heads, n, width]`` of a layout."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self._parts = [nbytes // layout.n_kv_heads for nbytes in layout.part_nbytes(1)]
        self.width = sum(self._parts)
        self._value_at = self._parts[0] + self._parts[1]
        self._keys: dict[int, np.ndarray] = {}

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.width * self.layout.n_kv_heads

    def empty(self, n_tokens: int) -> np.ndarray:
        return np.zeros((self.layout.n_layers, self.layout.n_kv_heads, n_tokens, self.width), np.uint8)

    def make(self, tokens: Sequence[int], first_position: int, chain: int) -> np.ndarray:
        """Rows of consecutive tokens as computed: the last bit is set, which storing loses."""
        rows, at = self.empty(len(tokens)), self._value_at
        for i, token in enumerate(tokens):
            chain = xxhash.xxh3_64_intdigest(int(token).to_bytes(8, "little"), seed=chain)
            header = np.array([chain, int(token) | ((first_position + i) << 32)], "<u8").view(np.uint8)
            rows[:, :, i, :at] = self._key_bytes(int(token))
            rows[:, :, i, at:] = np.resize(header, self.width - at)
        filler = rows[..., at + _HEADER_NBYTES :]
        filler ^= self._salt(filler.shape[-1])
        rows[..., -1] |= 1
        return rows

    def chain(self, rows: np.ndarray) -> int:
        """The chained hash at the last of some rows; 0 without any."""
        if not rows.shape[2]:
            return 0
        return int.from_bytes(rows[0, 0, -1, self._value_at : self._value_at + _CHAIN_NBYTES].tobytes(), "little")

    def token_of(self, rows: np.ndarray, at: int) -> int:
        return self._word(rows, at, _CHAIN_NBYTES)

    def position_of(self, rows: np.ndarray, at: int) -> int:
        return self._word(rows, at, _CHAIN_NBYTES + 4)

    def scores(self, rows: np.ndarray, layer: int, sinks: int, first: int, last: int, repeated: set[int]) -> np.ndarray:
        """What a replay gives for one layer, ``[n_kv_heads, last - first]``: hashes of the rows, below 0.5 for tokens
        that are not `repeated`, above for those that are."""
        seed = xxhash.xxh3_64_intdigest(np.ascontiguousarray(rows[:, :, :sinks]).data)
        known = np.array([self.token_of(rows, i) in repeated for i in range(first, last)])
        hashes = [
            [xxhash.xxh3_64_intdigest(row.tobytes(), seed=seed) >> 40 for row in head]
            for head in rows[layer, :, first:last]
        ]
        return np.array(hashes, np.float32) / 2**25 + 0.5 * known

    def keys(self, rows: np.ndarray) -> np.ndarray:
        """Decoded keys, float32 ``[n, head_dim]``, of rows ``[n, width]`` of a head."""
        codes, bits = np.ascontiguousarray(rows[:, : self._parts[0]]), self.layout.kv_type.key_bits
        if bits == 4:
            codes = np.stack((codes & 15, codes >> 4), -1).reshape(len(rows), -1).view(np.int8) - 8
        return codes.view(np.float16 if bits == 16 else np.int8).astype(np.float32)

    def encode(self, rows: np.ndarray) -> list[list[memoryview]]:
        """Records by block and layer."""
        step = self.layout.block_tokens
        return [
            [memoryview(self._record(layer[:, first : first + step])) for layer in rows]
            for first in range(0, rows.shape[2], step)
        ]

    def decode(self, records: memoryview, n_tokens: int) -> np.ndarray:
        """Rows ``[n_kv_heads, n_tokens, width]`` of consecutive records of one layer.

        Raises ValueError when their size is not that of `n_tokens` tokens.
        """
        if len(records) != n_tokens * self.token_nbytes:
            raise ValueError(f"{len(records)} bytes are not {n_tokens} tokens")
        heads, at = self.layout.n_kv_heads, 0
        out = np.empty((heads, n_tokens, self.width), np.uint8)
        for first in range(0, n_tokens, self.layout.block_tokens):
            n, column = min(self.layout.block_tokens, n_tokens - first), 0
            for width in self._parts:
                part = np.frombuffer(records, np.uint8, heads * n * width, at).reshape(heads, n, width)
                out[:, first : first + n, column : column + width] = part
                at, column = at + part.size, column + width
        return out

    def _record(self, rows: np.ndarray) -> bytes:
        edges = np.cumsum(self._parts)[:-1]
        return b"".join(part.tobytes() for part in np.split(rows, edges, axis=2))

    def _word(self, rows: np.ndarray, at: int, offset: int) -> int:
        first = self._value_at + offset
        return int.from_bytes(rows[0, 0, at, first : first + 4].tobytes(), "little")

    def _salt(self, n: int) -> np.ndarray:
        """Bytes that differ by layer and head, so that rows in the wrong place differ: ``[layers, heads, 1, n]``."""
        layers, heads = self.layout.n_layers, self.layout.n_kv_heads
        places = np.arange(layers * heads).reshape(layers, heads, 1, 1)
        return ((np.arange(n) + 31 * places + 1) % 256).astype(np.uint8)

    def _key_bytes(self, token: int) -> np.ndarray:
        """Codes and scales of a token's key: ``[n_layers, n_kv_heads, bytes]``."""
        known = self._keys.get(token)
        if known is None:
            layout = self.layout
            known = self._keys[token] = np.stack(
                [
                    np.stack([self._encoded_key(token, layer, head) for head in range(layout.n_kv_heads)])
                    for layer in range(layout.n_layers)
                ]
            )
        return known

    def _encoded_key(self, token: int, layer: int, head: int) -> np.ndarray:
        pattern, bits = key_pattern(token, layer, head, self.layout.head_dim), self.layout.kv_type.key_bits
        if bits == 16:
            return pattern.astype(np.float16).view(np.uint8)
        codes = pattern.astype(np.int8).view(np.uint8)
        if bits == 4:
            nibbles = (pattern + 8).astype(np.uint8)
            codes = nibbles[0::2] | nibbles[1::2] << 4
        return np.concatenate((codes, np.tile(_ONE, self._parts[1] // 2)))


def stored_form(rows: np.ndarray) -> np.ndarray:
    """What encoding and decoding leaves of computed rows: as with a real codec, not everything."""
    stored = rows.copy()
    stored[..., -1] &= 0xFE
    return stored
