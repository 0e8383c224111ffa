"""What is needed to tell where answers look: queries out of a step, keys out of the pool and the tails.

A captured decode step copies the queries of a few heads to a tensor that stays in place, for the graph to find it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cache_store.layout import KVLayout
from service.engine.exl2_engine.model import DecoderModel
from service.engine.exl2_engine.pool import BlockPool, Document
from service.engine.exl2_engine.portable_attend import slot_pages
from service.engine.exl2_engine.portable_records import decoded, record_parts
from service.engine.exl2_engine.tails import Tails
from service.engine.watch.masses import HeadKeys
from service.engine.watch.queries import KeptQueries


class WatchedHeads:
    """The queries of `heads`, pairs of layer and KV head, out of steps; and what was kept of them for the tails that
    are watched. `captured`: those of all rows of the step that was captured and ran last, at most `max_rows`."""

    def __init__(self, heads: Sequence[tuple[int, int]], model: DecoderModel, max_rows: int) -> None:
        """Raises ValueError for heads that the model has not."""
        if not all(0 <= i < model.n_layers and 0 <= h < model.n_kv_heads for i, h in heads):
            raise ValueError(f"the model has no KV heads {list(heads)}")
        self.heads = tuple(heads)
        self.kept = KeptQueries()
        self._kv_heads = model.n_kv_heads
        shape = (max_rows, len(heads), model.n_heads // model.n_kv_heads, model.head_dim)
        self.captured = torch.zeros(shape, dtype=model.dtype, device=model.device)

    def room(self, n_rows: int) -> Tensor:
        """Memory for the queries of a step that is not captured."""
        return self.captured.new_empty((n_rows, *self.captured.shape[1:]))

    def take(self, layer: int, q: Tensor, into: Tensor, rows: Tensor | None = None) -> None:
        """Put a layer's queries ``[R, n_heads, head_dim]`` there; `rows` int64 on the device, None for all."""
        for place, (of_layer, head) in enumerate(self.heads):
            if of_layer == layer:
                of_head = q.unflatten(1, (self._kv_heads, -1))[:, head]
                wanted = of_head if rows is None else of_head.index_select(0, rows)
                into[: len(wanted), place].copy_(wanted)

    def watches(self, slots: Sequence[int]) -> bool:
        return bool(self.heads) and any(slot in self.kept for slot in slots)

    def keep(self, slots: Sequence[int], queries: Tensor, counts: Sequence[int]) -> None:
        """Keep a step's queries for the tails that are watched: `counts` rows of each slot, in this order."""
        self.kept.add(slots, queries[: sum(counts)].clone(), counts)


def head_keys(pool: BlockPool, document: Document, tails: Tails, slot: int, layer: int, head: int) -> HeadKeys:
    """Keys of one head, decoded as they are asked for."""
    layout = pool.layout
    codes, scales = (part[:, head] for part in record_parts(pool.layers[layer], layout)[:2])
    size, bits = layout.block_tokens, layout.kv_type.key_bits

    def keys(some: slice) -> Tensor:
        blocks = document.blocks[some.start // size : -(-some.stop // size)]
        values = decoded(codes.index_select(0, blocks), scales.index_select(0, blocks), bits).flatten(0, 1)
        first = some.start // size * size
        return values[some.start - first : some.stop - first].float()

    tail = tails.k[layer, slot, head, : tails.length(slot)]
    return HeadKeys(keys, document.n_tokens, _slots(pool, document, layer, head, layout), tail)


def _slots(pool: BlockPool, document: Document, layer: int, head: int, layout: KVLayout) -> Tensor:
    slots = document.slots
    n = 0 if slots is None else int(slots.counts[layer, head])
    if slots is None or not n:
        return torch.empty(0, layout.head_dim, device=pool.device)
    first, n_pages = int(slots.starts[layer, head]), -(-n // layout.block_tokens)
    pages = torch.arange(first, first + n_pages, device=pool.device)[None]
    blocks = torch.tensor(document.block_ids[slots.first :], device=pool.device)
    return slot_pages(pool.records, blocks, pages, layout)[0][0, :n]
