"""Blocks of documents on the card: one allocation for all layers, blocks taken and given back, nothing else in it.

A block has the same number in every layer. It belongs to one document at a time, which any number of sequences read.
"""

import torch
from torch import Tensor

from cache_store.layout import KVLayout
from cache_store.slots import Counts
from service.engine.exl2_engine.slots import DocumentSlots, n_slot_blocks


class PoolExhausted(MemoryError):
    """There are fewer free blocks than a document needs."""


class Document:
    """Blocks of one document, in order. `blocks` is int32 on the device. `n_tokens` of `capacity` tokens are there.

    `positions`: (next, last) of `service.engine.protocol.Resident`, None for tokens at consecutive positions from 0.
    `prefix`: tokens that later segments share (`Exl2Runner.keep_prefix`); chunk boundaries count from behind them.
    `slots`: rows of each head's own; their blocks are the last of `block_ids`, not of `blocks`.
    """

    def __init__(self, block_ids: list[int], capacity: int, nbytes: int, device: torch.device) -> None:
        self.block_ids = block_ids
        self.blocks = torch.tensor(block_ids, dtype=torch.int32).to(device)
        self.capacity = capacity
        self.nbytes = nbytes
        self.n_tokens = 0
        self.positions: tuple[int, int] | None = None
        self.prefix = 0
        self.slots: DocumentSlots | None = None

    @property
    def next_position(self) -> int:
        return self.positions[0] if self.positions else self.n_tokens

    @property
    def last_position(self) -> int:
        return self.positions[1] if self.positions else self.n_tokens - 1


class BlockPool:
    """`layers[i]` is layer i's blocks, uint8 ``[n_blocks, block bytes]``; `records` those of all of them. `slot_table`:
    see `LayerSlots`.

    Allocated once. Raises what torch raises when the card has no room for it.
    """

    def __init__(self, layout: KVLayout, n_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.n_blocks = n_blocks
        self.block_nbytes = block_nbytes(layout)
        shape = (layout.n_layers, n_blocks, layout.record_nbytes(layout.block_tokens))
        # Zeros: kernels read a partial block's whole tiles and mask what they compute, and 0 times NaN is NaN.
        self.records = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.layers = list(self.records.unbind())
        heads = (n_blocks, layout.n_layers, layout.n_kv_heads, 2)
        self.slot_table = torch.zeros(heads, dtype=torch.int32, device=device)
        self._free = list(range(n_blocks - 1, -1, -1))

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        return self.n_blocks * self.block_nbytes

    def document_nbytes(self, n_tokens: int, n_slots: int = 0) -> int:
        """Bytes that a document of `n_tokens` tokens and `n_slots` slots of all heads takes: whole blocks, at least
        one."""
        return (max(self.layout.n_blocks(n_tokens), 1) + n_slot_blocks(self.layout, n_slots)) * self.block_nbytes

    def take(self, n_tokens: int) -> Document:
        """Blocks for a document of `n_tokens` tokens. Raises PoolExhausted; nothing is taken then."""
        ids = self._take(max(self.layout.n_blocks(n_tokens), 1), f"a document of {n_tokens} tokens")
        return Document(ids, n_tokens, len(ids) * self.block_nbytes, self.device)

    def take_slots(self, document: Document, counts: Counts) -> None:
        """Blocks for slots of a document that has none. Raises PoolExhausted; ValueError for counts that are not the
        model's, or a document that has some."""
        if document.slots is not None:
            raise ValueError("the document has slots already")
        slots = DocumentSlots.of(counts, self.layout, len(document.block_ids))
        ids = self._take(n_slot_blocks(self.layout, slots.n_slots), f"a document's {slots.n_slots} slots")
        if ids:
            self.slot_table[ids[0]] = slots.table().to(self.device)
        document.slots = slots
        document.block_ids = document.block_ids + ids
        document.nbytes += len(ids) * self.block_nbytes

    def _take(self, n: int, what: str) -> list[int]:
        """The lowest free blocks, in order: copies to and from host memory are as long as blocks lie side by side."""
        if n > len(self._free):
            raise PoolExhausted(f"{what}: {n} blocks are needed, free are {len(self._free)} of {self.n_blocks}")
        self._free.sort(reverse=True)
        return [self._free.pop() for _ in range(n)]

    def give_back(self, document: Document) -> None:
        """Free a document's blocks, once; it has none afterwards."""
        self._free.extend(document.block_ids)
        document.block_ids = []
        document.blocks = document.blocks[:0]
        document.n_tokens = document.capacity = document.nbytes = document.prefix = 0
        document.positions = document.slots = None

    def wipe(self, blocks: Tensor) -> None:
        """Zero `blocks` in every layer, so that nothing unusable stays where partial blocks leave bytes unwritten."""
        for pool in self.layers:
            pool.index_fill_(0, blocks.long(), 0)


def block_nbytes(layout: KVLayout) -> int:
    """Bytes of one block of 256 tokens over all layers."""
    return layout.record_nbytes(layout.block_tokens) * layout.n_layers
