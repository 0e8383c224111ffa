"""Summary slots on the card: rows of a document that every head of every layer has for itself, in blocks of its own.

A pool's block holds 256 rows of each KV head of each layer: ``n_layers * n_kv_heads`` *pages*, any of which can hold
slots of any head. A head's slots fill consecutive pages of their document, so that what is left free is less than a
page a head, however differently they are spread over heads and layers. Where a head's pages begin and how many slots it
has stands in a table that belongs to the first of the blocks: kernels read it there, and a step only says which block
that is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cache_store.layout import KVLayout
from cache_store.slots import SLOT_BLOCK_TOKENS, Counts, slot_layout, stored_rows


class LayerSlots(NamedTuple):
    """What attention of one layer needs to find slots. `records`: the pool's blocks of every layer, uint8
    ``[n_layers, n_blocks, record_nbytes]``. `table`: int32 ``[n_blocks, n_layers, n_kv_heads, 2]``, in the row of a
    document's first block of slots the number of slots and the first page of every head. `layer`: which layer it is."""

    records: Tensor
    table: Tensor
    layer: int


@dataclass(frozen=True, slots=True)
class DocumentSlots:
    """Slots of a document: `counts` ``[n_layers][n_kv_heads]`` of them, `starts` the first page of each head.

    `first`: place of the first of their blocks among the document's, 0 where there are none.
    """

    counts: np.ndarray
    starts: np.ndarray
    first: int

    @classmethod
    def of(cls, counts: Counts, layout: KVLayout, first: int) -> "DocumentSlots":
        """Raises ValueError for counts that are not the model's."""
        sizes = (layout.n_layers, layout.n_kv_heads)
        if len(counts) != sizes[0] or any(len(of_layer) != sizes[1] for of_layer in counts):
            raise ValueError(f"slots are counted for {sizes[0]} layers of {sizes[1]} heads")
        array = np.array(counts, np.int64)
        if array.min() < 0:
            raise ValueError("a head has no negative number of slots")
        pages = -(-array // layout.block_tokens)
        starts = (pages.cumsum() - pages.ravel()).reshape(sizes)
        return cls(array, starts, first if array.any() else 0)

    @property
    def n_slots(self) -> int:
        return int(self.counts.sum())

    @property
    def most(self) -> int:
        """Slots of the head that has most."""
        return int(self.counts.max())

    def table(self) -> Tensor:
        """The document's row of `LayerSlots.table`, on the host."""
        return torch.from_numpy(np.stack((self.counts, self.starts), -1).astype(np.int32))


def n_slot_blocks(layout: KVLayout, n_slots: int) -> int:
    """Blocks that hold `n_slots` slots, those of all heads of all layers together, however they are spread."""
    n_heads, page = layout.n_layers * layout.n_kv_heads, layout.block_tokens
    most_pages = (n_slots + (page - 1) * n_heads) // page
    return -(-most_pages // n_heads) if n_slots else 0


def write_slots(
    records: memoryview, slots: DocumentSlots, block_ids: Sequence[int], layer: int, layout: KVLayout, pool: Tensor
) -> None:
    """Put the slots of one layer, records as `cache_store.slots` says, into the pool's blocks of every layer, uint8
    ``[n_layers, n_blocks, record_nbytes]``. `block_ids`: all blocks of the document.

    Raises ValueError when the records are not as long as the counts say.
    """
    own, page_blocks = slot_layout(layout), layout.block_tokens // SLOT_BLOCK_TOKENS
    n_blocks = [stored_rows(int(n)) // SLOT_BLOCK_TOKENS for n in slots.counts[layer]]
    nbytes = own.record_nbytes(SLOT_BLOCK_TOKENS)
    if records.nbytes != sum(n_blocks) * nbytes:
        raise ValueError(f"{sum(n_blocks) * SLOT_BLOCK_TOKENS} slots do not take {records.nbytes} bytes of records")
    if not records.nbytes:
        return
    places = _places(slots.starts[layer], n_blocks, block_ids[slots.first :], layout, pool.shape[1])
    at = [torch.from_numpy(place).to(pool.device) for place in places]
    data = torch.frombuffer(bytearray(records) if records.readonly else records, dtype=torch.uint8)
    source = data.to(pool.device, non_blocking=True).view(-1, nbytes).view(torch.int64)
    target = pool.flatten(0, 1).view(torch.int64)
    begin = end = 0
    for part in own.part_nbytes(SLOT_BLOCK_TOKENS):
        width = part // 8
        size = width * layout.n_kv_heads * page_blocks
        pages = target[:, end : end + size].unflatten(1, (layout.n_kv_heads, page_blocks, width)) if size else None
        if pages is not None:
            pages.index_put_(tuple(at), source[:, begin : begin + width])
        begin, end = begin + width, end + size


def _places(
    starts: np.ndarray, n_blocks: Sequence[int], block_ids: Sequence[int], layout: KVLayout, pool_blocks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each stored block of a layer's slots: the block of the pool, counted over all layers, the page there and the
    place within the page."""
    page_blocks = layout.block_tokens // SLOT_BLOCK_TOKENS
    within = np.concatenate([np.arange(n) for n in n_blocks])
    pages = np.repeat(starts, n_blocks) + within // page_blocks
    n_heads = layout.n_layers * layout.n_kv_heads
    blocks = np.array(block_ids, np.int64)[pages // n_heads]
    layer, part = np.divmod(pages % n_heads, layout.n_kv_heads)
    return layer * pool_blocks + blocks, part, within % page_blocks
