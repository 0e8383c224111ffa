"""Documents' blocks between the card and host memory; `service.engine.protocol.HostCopies`.

A block is copied as it is, also a partial one. Blocks that lie side by side in the pool go in one copy.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from cache_store.layout import KVLayout
from service.engine.exl2_engine.copies import CopyStream, Mark
from service.engine.exl2_engine.host_memory import HostMemory, Rows
from service.engine.exl2_engine.restore import adjacent


class HasBlocks(Protocol):
    """A document of a pool: the numbers of its blocks, in order."""

    block_ids: list[int]


class BlockCopies:
    """Copies between pools (uint8 ``[n_blocks, record_nbytes(256)]``, one for each layer) and host memory."""

    def __init__(self, pools: Sequence[Tensor], layout: KVLayout, copies: CopyStream, memory: HostMemory) -> None:
        self._pools = pools
        self._layout = layout
        self._copies = copies
        self._memory = memory

    @property
    def used_nbytes(self) -> int:
        return self._memory.used_nbytes

    def nbytes_of(self, n_tokens: int) -> int:
        return self._n_rows(n_tokens) * self._memory.row_nbytes

    def take(self, n_tokens: int) -> Rows | None:
        return self._memory.take(self._n_rows(n_tokens))

    def give_back(self, memory: Rows) -> None:
        self._memory.give_back(memory)

    def copy_out(self, document: HasBlocks, memory: Rows, layer: int) -> None:
        """Begin copying a layer to host memory. Layer 0 first: it waits for the steps that wrote the document."""
        self._begin(layer)
        with self._copies.queued():
            for blocks, rows in self._pairs(document.block_ids, memory, layer):
                rows.copy_(blocks, non_blocking=True)

    def copy_in(self, memory: Rows, document: HasBlocks, layer: int) -> None:
        """Begin copying a layer to the card. Layer 0 first: it waits for the steps that may still read the blocks."""
        self._begin(layer)
        with self._copies.queued():
            for blocks, rows in self._pairs(document.block_ids, memory, layer):
                blocks.copy_(rows, non_blocking=True)

    def mark(self) -> Mark:
        return self._copies.mark()

    def close(self) -> None:
        self._memory.close()

    def _begin(self, layer: int) -> None:
        if layer == 0:
            self._copies.after_compute()

    def _n_rows(self, n_tokens: int) -> int:
        return self._layout.n_blocks(n_tokens) * self._layout.n_layers

    def _pairs(self, block_ids: list[int], memory: Rows, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Consecutive blocks of a layer and as many consecutive rows of host memory, over the whole document."""
        pool, at = self._pools[layer], layer * len(block_ids)
        for block, n in adjacent(block_ids):
            for rows in memory.parts(at, n):
                yield pool[block : block + len(rows)], rows
                block += len(rows)
            at += n
