"""How the records of a snapshot are read: in pieces, each one read of one shard, into memory that the user provides.

The store knows nothing of devices: memory that a card can copy from comes through `Buffers`, with its own rule of when
it is free again.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from cache_store.shards import Geometry, Shard

Run = tuple[int, int, memoryview, int]
"""Layer, first token, verified records of consecutive blocks of that layer, number of tokens in them."""

Order = Literal["shard", "layer"]
"""Shard by shard as the files lie on disk, or layer by layer over all shards."""


class Buffers(Protocol):
    """Memory to read into. `take` and `give_back` may be called from any thread.

    `piece_nbytes`: how much to read at once, where the layout allows it; no record is larger. `n_readers`: threads
    that read and verify at the same time.
    """

    piece_nbytes: int
    n_readers: int

    def take(self, nbytes: int, *, wait: bool) -> memoryview | None:
        """Memory of `nbytes` bytes. When there is none now, None, or with `wait` the first that is given back."""
        ...

    def give_back(self, memory: memoryview) -> None:
        """What `take` gave is not needed any more, or not after the copies that were begun from it."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive bytes of a shard: the records of `n_blocks` blocks in each of `n_layers` layers. Several layers only
    with all blocks of the shard."""

    shard: Shard
    first_layer: int
    n_layers: int
    first_block: int
    n_blocks: int
    offset: int
    nbytes: int

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.n_layers)

    @property
    def blocks(self) -> range:
        return range(self.first_block, self.first_block + self.n_blocks)


class Piece:
    """Verified runs in one piece of memory, which is its holder's until `release`."""

    __slots__ = ("_buffers", "_memory", "runs")

    def __init__(self, runs: list[Run], memory: memoryview, buffers: Buffers) -> None:
        self.runs = runs
        self._memory: memoryview | None = memory
        self._buffers = buffers

    def release(self) -> None:
        """Give the memory back; a second call does nothing."""
        memory, self._memory = self._memory, None
        self.runs = []
        if memory is not None:
            self._buffers.give_back(memory)


def plan_spans(geometry: Geometry, piece_nbytes: int, order: Order) -> list[Span]:
    """Every record once, in spans of at most `piece_nbytes` bytes (a single record may be larger)."""
    spans = [span for shard in geometry.shards for span in _spans_of(geometry, shard, piece_nbytes)]
    if order == "layer":
        spans.sort(key=lambda span: (span.first_layer, span.first_block))
    return spans


def layer_spans(geometry: Geometry, layer: int) -> list[Span]:
    """One layer, a span for each shard."""
    shards = [s for s in geometry.shards if s.first_layer <= layer < s.first_layer + s.n_layers]
    return [_whole_layers(shard, layer, 1) for shard in shards]


def block_spans(geometry: Geometry, blocks: Iterable[int]) -> list[Span]:
    """All layers of some blocks and nothing else: a span for each layer and row of neighbours in a shard."""
    wanted = sorted(set(blocks))
    spans: list[Span] = []
    for shard in geometry.shards:
        rows = _rows_of(wanted[bisect_left(wanted, shard.first_block) : bisect_left(wanted, shard.end_block)])
        for layer in range(shard.first_layer, shard.first_layer + shard.n_layers) if rows else ():
            spans += [_neighbours(geometry, shard, layer, first, n) for first, n in rows]
    return spans


def _rows_of(blocks: list[int]) -> list[tuple[int, int]]:
    """First block and number of blocks of each row of neighbours."""
    rows: list[tuple[int, int]] = []
    for block in blocks:
        first, n = rows[-1] if rows else (block, 0)
        if block == first + n:
            rows[-1:] = [(first, n + 1)]
        else:
            rows.append((block, 1))
    return rows


def _spans_of(geometry: Geometry, shard: Shard, piece_nbytes: int) -> Iterator[Span]:
    # By the largest shard, so that the last one, which is smaller, is cut at the same layers.
    together = max(1, piece_nbytes // geometry.shards[0].layer_nbytes)
    end = shard.first_layer + shard.n_layers
    for layer in range(shard.first_layer, end, together):
        if shard.layer_nbytes > piece_nbytes:
            yield from _parts_of_layer(geometry, shard, layer, piece_nbytes)
        else:
            yield _whole_layers(shard, layer, min(together, end - layer))


def _whole_layers(shard: Shard, layer: int, n: int) -> Span:
    return Span(shard, layer, n, shard.first_block, shard.n_blocks, shard.layer_offset(layer), n * shard.layer_nbytes)


def _parts_of_layer(geometry: Geometry, shard: Shard, layer: int, piece_nbytes: int) -> Iterator[Span]:
    together = max(1, piece_nbytes // geometry.layout.record_nbytes(geometry.layout.block_tokens))
    end = shard.end_block
    for block in range(shard.first_block, end, together):
        yield _neighbours(geometry, shard, layer, block, min(together, end - block))


def _neighbours(geometry: Geometry, shard: Shard, layer: int, first_block: int, n: int) -> Span:
    """The records of `n` blocks from `first_block` on in one layer."""
    lengths = map(geometry.block_length, range(first_block, first_block + n))
    nbytes = sum(map(geometry.layout.record_nbytes, lengths))
    return Span(shard, layer, 1, first_block, n, geometry.record_offset(shard, first_block, layer), nbytes)
