"""Picks rows out of encoded KV: the bytes of a token's keys and values move, nothing is decoded or computed.

A row is one token of one head: its key's codes and scales, its value's codes and scales. In a record they lie apart,
each head-major (`cache_store.layout`); a record of picked rows is laid out alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from cache_store.layout import KVLayout
from cache_store.slots import slot_layout, stored_rows

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[Any]

_JOINED_NBYTES = 1 << 20


def take_rows(
    records: memoryview | Sequence[memoryview], n_tokens: int, layout: KVLayout, rows: npt.NDArray[np.integer[Any]]
) -> list[memoryview]:
    """The records of the picked rows, in blocks of `layout.block_tokens` rows of which the last may be shorter.

    `records`: consecutive blocks of one layer that hold `n_tokens` tokens together, in one piece or in several, each of
    whole records. `rows`: places among these tokens, int ``[n]`` for all heads alike or ``[n_kv_heads, n]`` for each
    its own, in the order in which they come out; a place may come more than once.
    Raises ValueError when sizes do not fit or a place is none.
    """
    return join_rows([Source(records, n_tokens, rows)], layout)


@dataclass(frozen=True, slots=True)
class Source:
    """Where some rows come from: the arguments of `take_rows` of these names."""

    records: memoryview | Sequence[memoryview]
    n_tokens: int
    rows: npt.NDArray[np.integer[Any]]


def join_rows(sources: Sequence[Source], layout: KVLayout) -> list[memoryview]:
    """The picked rows of several sources behind each other, as `take_rows` gives those of one. Raises as it does."""
    places = [_places(source.rows, source.n_tokens, layout) for source in sources]
    n_rows = sum(of_source.shape[1] for of_source in places)
    taken = [np.empty((layout.n_kv_heads, n_rows), dtype) for dtype in _row_types(layout)]
    at = 0
    for source, of_source in zip(sources, places, strict=True):
        n = of_source.shape[1]
        _take(source, of_source, [part[:, at : at + n] for part in taken], layout)
        at += n
    return [_record(taken, first, layout) for first in range(0, n_rows, layout.block_tokens)]


def _take(source: Source, places: Rows, taken: Sequence[Bytes], layout: KVLayout) -> None:
    for first, last, parts in _blocks(source.records, source.n_tokens, layout):
        heads, columns = np.nonzero((places >= first) & (places < last))
        if len(heads):
            block, row = np.divmod(places[heads, columns] - first, layout.block_tokens)
            for part, out in zip(parts, taken, strict=True):
                out[heads, columns] = part[block, heads, row]


def take_head_rows(
    records: memoryview | Sequence[memoryview],
    n_tokens: int,
    layout: KVLayout,
    head: int,
    rows: npt.NDArray[np.integer[Any]],
) -> list[memoryview]:
    """The picked rows of one head, as its records of a snapshot of slots: of `slot_layout(layout)`, the last filled up
    by repeating the last row; none without rows.

    `records` and `n_tokens` are those of `take_rows`; `rows`: places among these tokens, int ``[n]``. Raises ValueError
    as `take_rows` does, and for a head that is none.
    """
    if not 0 <= head < layout.n_kv_heads or rows.ndim != 1:
        raise ValueError(f"rows [n] of one of {layout.n_kv_heads} heads, not {list(rows.shape)} of head {head}")
    own = slot_layout(layout)
    places = _places(rows, n_tokens, own)
    if not places.size:
        return []
    places = np.pad(places, ((0, 0), (0, stored_rows(len(rows)) - len(rows))), "edge")
    taken = [np.empty(places.shape, dtype) for dtype in _row_types(own)]
    for first, last, parts in _blocks(records, n_tokens, layout):
        columns = np.nonzero((places[0] >= first) & (places[0] < last))[0]
        block, row = np.divmod(places[0, columns] - first, layout.block_tokens)
        for part, out in zip(parts, taken, strict=True):
            out[0, columns] = part[block, head, row]
    return [_record(taken, first, own) for first in range(0, places.shape[1], own.block_tokens)]


def _places(rows: npt.NDArray[np.integer[Any]], n_tokens: int, layout: KVLayout) -> Rows:
    """``[n_kv_heads, n]``, checked."""
    if not np.issubdtype(rows.dtype, np.integer) or rows.ndim not in (1, 2):
        raise ValueError(f"rows are integers [n] or [n_kv_heads, n], not {rows.dtype} {list(rows.shape)}")
    if rows.ndim == 2 and rows.shape[0] != layout.n_kv_heads:
        raise ValueError(f"rows of {rows.shape[0]} heads, not {layout.n_kv_heads}")
    places = np.broadcast_to(rows, (layout.n_kv_heads, rows.shape[-1])).astype(np.int64)
    if places.size and not 0 <= places.min() <= places.max() < n_tokens:
        raise ValueError(f"rows {places.min()} to {places.max()} are not all among {n_tokens} tokens")
    return places


def _row_types(layout: KVLayout) -> list[np.dtype[np.void]]:
    """One row of k_codes, k_scales, v_codes, v_scales, as a lump of bytes; no part for a KV type without scales."""
    sizes = [nbytes // layout.n_kv_heads for nbytes in layout.part_nbytes(1)]
    return [np.dtype((np.void, nbytes)) for nbytes in sizes if nbytes]


def _blocks(
    records: memoryview | Sequence[memoryview], n_tokens: int, layout: KVLayout
) -> Iterator[tuple[int, int, list[Bytes]]]:
    """Runs of blocks of one length: first and last token, parts ``[n_blocks, n_kv_heads, length]`` of rows."""
    pieces = cast("Sequence[memoryview]", [records] if isinstance(records, memoryview) else records)
    whole, at = layout.block_tokens, 0
    for piece in _joined(pieces):
        data: npt.NDArray[np.uint8] = np.frombuffer(piece, np.uint8)
        n_blocks = min(len(data) // layout.record_nbytes(whole), (n_tokens - at) // whole)
        nbytes, length = n_blocks * layout.record_nbytes(whole), n_blocks * whole
        if n_blocks:
            yield at, at + length, _parts(data[:nbytes], n_blocks, whole, layout)
            at += length
        if nbytes < len(data):
            # The bytes behind the whole blocks are the last, shorter one, or too many.
            if not 0 < n_tokens - at < whole or len(data) - nbytes != layout.record_nbytes(n_tokens - at):
                raise ValueError(f"{len(data)} bytes are not whole records of {n_tokens} tokens")
            yield at, n_tokens, _parts(data[nbytes:], 1, n_tokens - at, layout)
            at = n_tokens
    if at != n_tokens:
        raise ValueError(f"the records hold {at} of {n_tokens} tokens")


def _joined(pieces: Sequence[memoryview]) -> Iterator[memoryview]:
    """The same bytes without small pieces: to look for rows in one costs more than to copy it."""
    small: list[memoryview] = []
    for i, piece in enumerate(pieces, 1):
        small.append(piece)
        if i == len(pieces) or sum(one.nbytes for one in small) >= _JOINED_NBYTES:
            yield small[0] if len(small) == 1 else memoryview(b"".join(small))
            small = []


def _parts(data: npt.NDArray[np.uint8], n_blocks: int, length: int, layout: KVLayout) -> list[Bytes]:
    records = data.reshape(n_blocks, -1)
    parts: list[Bytes] = []
    at = 0
    for dtype in _row_types(layout):
        nbytes = layout.n_kv_heads * length * dtype.itemsize
        part = records[:, at : at + nbytes].reshape(n_blocks, layout.n_kv_heads, length, dtype.itemsize)
        parts.append(part.view(dtype)[..., 0])
        at += nbytes
    return parts


def _record(taken: list[Bytes], first: int, layout: KVLayout) -> memoryview:
    """The record of the block of rows that begins at `first`."""
    parts = [part[:, first : first + layout.block_tokens] for part in taken]
    return memoryview(bytearray().join(part.tobytes() for part in parts))
