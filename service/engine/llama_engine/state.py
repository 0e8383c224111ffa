"""The bytes of a sequence's state as llama.cpp writes and reads them, and the records of our snapshots made of them.

A state is ``magic, sequence, streams, cells | (position, 1, sequence) of each cell | is V transposed, layers |
(type, row size, rows) of each layer's keys | the same of the values``, little-endian. Everything but the rows is
written here, from the model that is loaded: llama.cpp's reader, which trusts what it is given, never sees a length or
a type that came from a file. A row of a layer is one token's keys or values of all heads, in a KV type of ggml.

A record of a block of a layer is its tokens' rows of keys, then those of values: as long as one of `cache_store.layout`
in the KV type of as many bits.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cache_store.layout import KVLayout, KVType, packed_nbytes

MAGIC = 0xAF143CD8
F16, Q4_0, Q8_0 = 1, 2, 8
"""`enum ggml_type`."""
GGML_TYPES = {16: F16, 8: Q8_0, 4: Q4_0}
NAMES = {F16: "f16", Q8_0: "q8_0", Q4_0: "q4_0"}

_HEAD = struct.Struct("<IiII")
_BODY = struct.Struct("<II")
_LAYER = struct.Struct("<iQ")
_CELL_NBYTES = 12

Bytes = npt.NDArray[np.uint8]


class StateMismatch(Exception):
    """llama.cpp gave a state of another form: a model with more than plain KV, or another version."""


def ggml_types(kv_type: KVType) -> tuple[int, int]:
    """The types of keys and of values."""
    return GGML_TYPES[kv_type.key_bits], GGML_TYPES[kv_type.value_bits]


@dataclass(frozen=True, slots=True)
class KVRows:
    """Views of a state's rows: `keys` ``[n_layers, n_tokens, bytes]``, `values` likewise."""

    keys: Bytes
    values: Bytes

    @property
    def n_tokens(self) -> int:
        return self.keys.shape[1]


class StateFormat:
    """States of the sequences of one model in one KV type."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self._types = ggml_types(layout.kv_type)
        bits = layout.kv_type.key_bits, layout.kv_type.value_bits
        self._row_nbytes = [layout.n_kv_heads * sum(packed_nbytes(b, layout.head_dim)) for b in bits]

    def nbytes(self, n_tokens: int) -> int:
        rows = sum(_LAYER.size + n_tokens * row for row in self._row_nbytes)
        return _HEAD.size + n_tokens * _CELL_NBYTES + _BODY.size + self.layout.n_layers * rows

    def new(self, n_tokens: int, first_position: int = 0, memory: Bytes | None = None) -> Bytes:
        """A state of `n_tokens` tokens at consecutive positions; its rows are not set. It begins `memory` where that is
        given."""
        nbytes = self.nbytes(n_tokens)
        state = np.empty(nbytes, np.uint8) if memory is None else memory[:nbytes]
        state[: _HEAD.size] = _bytes(_HEAD.pack(MAGIC, 0, 1, n_tokens))
        cells = self._cells(state, n_tokens)
        cells[:, 0] = np.arange(first_position, first_position + n_tokens)
        cells[:, 1:] = 1, 0
        at = self._body_at(n_tokens)
        state[at : at + _BODY.size] = _bytes(_BODY.pack(0, self.layout.n_layers))
        for part, kind, row in zip(self._layers(state, n_tokens), self._types, self._row_nbytes, strict=True):
            part[:, : _LAYER.size] = _bytes(_LAYER.pack(kind, row))
        return state

    def rows(self, state: Bytes, n_tokens: int) -> KVRows:
        """Views of the rows of a state of this form."""
        keys, values = (
            part[:, _LAYER.size :].reshape(self.layout.n_layers, n_tokens, row)
            for part, row in zip(self._layers(state, n_tokens), self._row_nbytes, strict=True)
        )
        return KVRows(keys, values)

    def read(self, state: Bytes, first_position: int, n_tokens: int) -> KVRows:
        """The rows of what llama.cpp gave for `n_tokens` tokens at consecutive positions, in that order. Raises
        StateMismatch for any other form."""
        if len(state) != self.nbytes(n_tokens):
            raise StateMismatch(f"a state of {len(state)} bytes for {n_tokens} tokens, not {self.nbytes(n_tokens)}")
        cells = self._cells(state, n_tokens)
        order = np.argsort(cells[:, 0], kind="stable")
        expected = self.new(n_tokens, first_position)
        if not self._same_form(state, expected, n_tokens, cells[order, 0]):
            raise StateMismatch("a state whose positions, types or rows are not those of the model")
        rows = self.rows(state, n_tokens)
        if (order[1:] > order[:-1]).all():
            return rows
        return KVRows(rows.keys[:, order], rows.values[:, order])

    def records(self, rows: KVRows) -> list[list[memoryview]]:
        """Blocks of at most `block_tokens` tokens as ``blocks[i][layer]``."""
        blocks, at = [], 0
        for n in self.layout.block_lengths(rows.n_tokens):
            pair = [part[:, at : at + n].reshape(self.layout.n_layers, -1) for part in (rows.keys, rows.values)]
            blocks.append([record.data for record in np.concatenate(pair, axis=1)])
            at += n
        return blocks

    def put(self, rows: KVRows, layer: int, first: int, records: memoryview, n_tokens: int) -> None:
        """Copy records of consecutive blocks of a layer to the rows from `first` on. Raises ValueError for a size that
        does not fit."""
        data, at = np.frombuffer(records, np.uint8), 0
        lengths = self.layout.block_lengths(n_tokens)
        if len(data) != sum(map(self.layout.record_nbytes, lengths)):
            raise ValueError(f"{n_tokens} tokens do not take {len(data)} bytes of records")
        if first + n_tokens > rows.n_tokens:
            raise ValueError(f"tokens {first} to {first + n_tokens} of {rows.n_tokens}")
        for n in lengths:
            for part in (rows.keys, rows.values):
                nbytes = n * part.shape[2]
                part[layer, first : first + n] = data[at : at + nbytes].reshape(n, -1)
                at += nbytes
            first += n

    def of_blocks(self, blocks: Sequence[Sequence[bytes | memoryview]], n_tokens: int) -> KVRows:
        """Rows of whole blocks ``blocks[i][layer]``, the last of which may be partial."""
        keys, values = (np.empty((self.layout.n_layers, n_tokens, row), np.uint8) for row in self._row_nbytes)
        rows, first = KVRows(keys, values), 0
        for block, n in zip(blocks, self.layout.block_lengths(n_tokens), strict=True):
            for layer, record in enumerate(block):
                self.put(rows, layer, first, memoryview(record), n)
            first += n
        return rows

    def _same_form(self, state: Bytes, expected: Bytes, n_tokens: int, positions: npt.NDArray[np.int32]) -> bool:
        head, at = _HEAD.unpack_from(state.data), self._body_at(n_tokens)
        kinds = zip(self._layers(state, n_tokens), self._layers(expected, n_tokens), strict=True)
        return (
            (head[0], *head[2:]) == (MAGIC, 1, n_tokens)
            and bool((positions == self._cells(expected, n_tokens)[:, 0]).all())
            and bytes(state[at : at + _BODY.size]) == bytes(expected[at : at + _BODY.size])
            and all(bool((a[:, : _LAYER.size] == b[:, : _LAYER.size]).all()) for a, b in kinds)
        )

    def _cells(self, state: Bytes, n_tokens: int) -> npt.NDArray[np.int32]:
        return state[_HEAD.size : self._body_at(n_tokens)].view("<i4").reshape(n_tokens, 3)

    def _body_at(self, n_tokens: int) -> int:
        return _HEAD.size + n_tokens * _CELL_NBYTES

    def _layers(self, state: Bytes, n_tokens: int) -> tuple[Bytes, Bytes]:
        """Of keys and of values: ``[n_layers, form and rows]``."""
        at = self._body_at(n_tokens) + _BODY.size
        ends = [at]
        for row in self._row_nbytes:
            ends.append(ends[-1] + self.layout.n_layers * (_LAYER.size + n_tokens * row))
        keys, values = (state[a:b].reshape(self.layout.n_layers, -1) for a, b in pairwise(ends))
        return keys, values


def _bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)
