"""Records from host memory into the blocks of a pool: what a restore does once they are verified.

Nothing is decoded: on the card a block is the record's bytes. Only a document's last block may differ, which on disk is
packed tightly for its tokens and in the pool has the strides of a whole one.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from cache_store.layout import KVLayout
from service.engine.exl2_engine.copies import CopyStream, HostRing

RING_NBYTES = 256 << 20
PIECE_NBYTES = 8 << 20
"""Bytes read and verified at once: large enough for a disk and the bus, small enough for many readers."""


class BlockLoader:
    """Copies records into pools (uint8 ``[n_blocks, record_nbytes(256)]``, one for each layer).

    `buffers` is the memory to read into: copies from it do not wait, and it is used again once they are over. From
    other memory it may be used again as soon as `load` returns. One thread calls the methods.
    """

    def __init__(
        self, pools: Sequence[Tensor], layout: KVLayout, copies: CopyStream, *, ring_nbytes: int = RING_NBYTES
    ) -> None:
        """Raises RuntimeError when there is no host memory for the ring."""
        self._pools = pools
        self._layout = layout
        self._copies = copies
        record = layout.record_nbytes(layout.block_tokens)
        slot = max(min(PIECE_NBYTES, ring_nbytes // 4), record)
        self.buffers = HostRing(copies, slot, max(2, ring_nbytes // slot))

    def begin(self) -> None:
        """To be called before the first `load` into blocks just taken: steps begun before may still read them."""
        self._copies.after_compute()

    def load(self, block_ids: Sequence[int], layer: int, first_token: int, records: memoryview, n_tokens: int) -> None:
        """Begin copying consecutive records of a layer; the last may be partial, the rest of its block becomes zero.

        `block_ids` are those of the whole document, `first_token` is a block's first. Raises ValueError when the
        bytes are not those of `n_tokens` tokens or do not fit the document.
        """
        layout, pool = self._layout, self._pools[layer]
        full, rest = divmod(n_tokens, layout.block_tokens)
        nbytes = layout.record_nbytes(layout.block_tokens)
        first = first_token // layout.block_tokens
        blocks = block_ids[first : first + full + bool(rest)]
        data = _as_tensor(records)
        if data.numel() != full * nbytes + layout.record_nbytes(rest) or len(blocks) != full + bool(rest):
            raise ValueError(
                f"{data.numel()} bytes in {len(blocks)} blocks are not {n_tokens} tokens from {first_token} on"
            )
        at = 0
        with self._copies.queued():
            for block, n in adjacent(blocks[:full]):
                source = data[at : at + n * nbytes].view(n, nbytes)
                pool[block : block + n].copy_(source, non_blocking=True)
                at += n * nbytes
            if rest:
                tight = data[at:].to(pool.device, non_blocking=True)
                spread(tight, rest, layout, pool[blocks[full]])

    def queued(self) -> AbstractContextManager[object]:
        """Other work on the blocks in the order of the copies."""
        return self._copies.queued()

    def end(self) -> None:
        """Steps begun from now on wait for every copy begun so far."""
        self._copies.before_compute()


def adjacent(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers: the first of each and how many there are."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[start], i - start
            start = i


def spread(record: Tensor, n_tokens: int, layout: KVLayout, block: Tensor) -> None:
    """Lay the record of `n_tokens` tokens out with the strides of a whole block; what it leaves free becomes zero.

    Both uint8 of one dim on one device. Zero, because kernels read whole blocks, and 0 times what an earlier document
    left there may be NaN.
    """
    block.zero_()
    whole, tight = layout.part_nbytes(layout.block_tokens), layout.part_nbytes(n_tokens)
    to = at = 0
    for nbytes, held in zip(whole, tight, strict=True):
        if nbytes:
            target = block[to : to + nbytes].view(layout.n_kv_heads, -1)
            target[:, : held // layout.n_kv_heads] = record[at : at + held].view(layout.n_kv_heads, -1)
        to, at = to + nbytes, at + held


def _as_tensor(records: memoryview) -> Tensor:
    view = memoryview(records).cast("B")
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
