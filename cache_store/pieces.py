"""How the records of a snapshot are read: in pieces, each one read of one shard, into memory that the user provides.

The store knows nothing of devices: memory that a card can copy from comes through `Buffers`, with its own rule of when
it is free again.
"""

from collections.abc import Iterator
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
    layout = geometry.layout
    together = max(1, piece_nbytes // layout.record_nbytes(layout.block_tokens))
    end = shard.first_block + shard.n_blocks
    for block in range(shard.first_block, end, together):
        n = min(together, end - block)
        nbytes = sum(layout.record_nbytes(geometry.block_length(b)) for b in range(block, block + n))
        yield Span(shard, layer, 1, block, n, geometry.record_offset(shard, block, layer), nbytes)
