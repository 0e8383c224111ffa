"""Random documents with slots in a real pool, decode steps over them, and their attention in FP64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cache_store.codec import decode_records, encode_records, rotate
from cache_store.layout import KVLayout, KVType
from cache_store.slots import slot_layout, stored_rows
from service.engine.exl2_engine.pool import BlockPool, Document
from service.engine.exl2_engine.rows import RowPlan, StepShape, pack, unpack
from service.engine.exl2_engine.slots import LayerSlots, write_slots
from service.engine.exl2_engine.step import Step

NAN_BYTE = 0xFF
Pairs = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Held:
    """A document in a pool, and the decoded keys and values that each head of each layer has of it."""

    document: Document
    heads: list[Pairs]


def filled_pool(layout: KVLayout, n_blocks: int, device: str = "cpu") -> BlockPool:
    """Nothing but NaN in its blocks, a table of anything."""
    pool = BlockPool(layout, n_blocks, torch.device(device))
    pool.records.fill_(NAN_BYTE)
    pool.slot_table.fill_(1 << 20)
    return pool


def hold(pool: BlockPool, n_tokens: int, counts: list[list[int]] | None, seed: int = 0) -> Held:
    """A document of `n_tokens` random rows and, unless `counts` is None, as many slots of each head."""
    made = torch.Generator().manual_seed(seed)
    document = pool.take(n_tokens)
    document.n_tokens = n_tokens
    layout, heads = pool.layout, []
    for blocks in pool.layers:
        k, v, records = _random(layout, layout.n_kv_heads, n_tokens, made)
        at = 0
        for block, n in zip(document.block_ids, layout.block_lengths(n_tokens), strict=True):
            _lay_out(records[at : at + layout.record_nbytes(n)], n, layout, blocks[block])
            at += layout.record_nbytes(n)
        heads.append([(k[head], v[head]) for head in range(layout.n_kv_heads)])
    if counts is not None:
        _add_slots(pool, document, counts, heads, made)
    return Held(document, heads)


def _add_slots(pool: BlockPool, document: Document, counts: list[list[int]], heads: list[Pairs], made) -> None:
    pool.take_slots(document, counts)
    own = slot_layout(pool.layout)
    assert document.slots is not None
    for layer, of_layer in enumerate(counts):
        stored = bytearray()
        for head, n in enumerate(of_layer):
            if n:
                k, v, records = _random(own, 1, stored_rows(n), made)
                stored += bytes(records.numpy())
                old_k, old_v = heads[layer][head]
                heads[layer][head] = torch.cat((old_k, k[0, :n])), torch.cat((old_v, v[0, :n]))
        write_slots(memoryview(stored), document.slots, document.block_ids, layer, pool.layout, pool.records)


def _random(layout: KVLayout, n_heads: int, n: int, made) -> tuple[Tensor, Tensor, Tensor]:
    """Decoded keys and values ``[n_heads, n, dim]``, still transformed, and their records."""
    k, v = (torch.randn(n_heads, n, layout.head_dim, generator=made) for _ in range(2))
    rotated = layout.kv_type is not KVType.FP16
    records = torch.frombuffer(bytearray().join(encode_records(k, v, layout, rotated=rotated)), dtype=torch.uint8)
    out_k, out_v = torch.empty_like(k), torch.empty_like(v)
    decode_records(records, n, layout, out_k=out_k, out_v=out_v, rotated=rotated)
    return out_k, out_v, records


def _lay_out(record: Tensor, n: int, layout: KVLayout, block: Tensor) -> None:
    """A record of `n` tokens with the strides of a whole block, NaN behind them."""
    at = to = 0
    for whole, part in zip(layout.part_nbytes(256), layout.part_nbytes(n), strict=True):
        own = record[at : at + part].view(layout.n_kv_heads, -1)
        block[to : to + whole].view(layout.n_kv_heads, -1)[:, : own.shape[1]] = own.to(block.device)
        at, to = at + part, to + whole


@dataclass(frozen=True, slots=True)
class SlotCase:
    """A step over documents, one row after another of each, and what its attention must be."""

    pool: BlockPool
    groups: list[tuple[Held | None, int]]
    step: Step
    q: Tensor
    tail_k: Tensor
    tail_v: Tensor
    tail_end: int

    @property
    def scale(self) -> float:
        return 1.5 * self.q.shape[2] ** -0.5

    def arguments(self, layer: int, dtype=torch.float16):
        q, tail_k, tail_v = (x.to(dtype) for x in (self.q, self.tail_k, self.tail_v))
        slots = LayerSlots(self.pool.records, self.pool.slot_table, layer)
        pool = self.pool.layers[layer]
        return self.step, q, pool, tail_k, tail_v, self.scale, self.pool.layout, None, slots

    def reference(self, layer: int) -> Tensor:
        """FP64 ``[rows, heads, dim]``; zeros for padding."""
        layout, q = self.pool.layout, self.q.double()
        out, row = torch.zeros_like(q), 0
        per_head = q.shape[1] // layout.n_kv_heads
        for held, n_rows in self.groups:
            for head in range(layout.n_kv_heads):
                k, v = (x[0, head, : self.tail_end].double() for x in (self.tail_k, self.tail_v))
                if held is not None:
                    own = held.heads[layer][head]
                    k, v = (torch.cat((x.to(q.device).double(), y)) for x, y in zip(own, (k, v), strict=True))
                some = slice(head * per_head, (head + 1) * per_head)
                out[row : row + n_rows, some] = (q[row : row + n_rows, some] @ k.T * self.scale).softmax(-1) @ v
            row += n_rows
        turned = layout.kv_type is not KVType.FP16
        return out @ rotate(torch.eye(layout.head_dim, device=q.device)).double() if turned else out


def slot_case(
    pool: BlockPool,
    groups: list[tuple[Held | None, int]],
    group_heads: int,
    *,
    shape: StepShape | None = None,
    tail_end: int = 5,
    seed: int = 0,
) -> SlotCase:
    """A step of so many rows of each document, all on one tail; `shape` larger than it needs is padding."""
    torch.manual_seed(seed)
    plan = RowPlan()
    for held, n_rows in groups:
        plan.documents.append(held.document if held else None)
        plan.group_rows.append(plan.group_rows[-1] + n_rows)
    n = plan.group_rows[-1]
    plan.ids, plan.positions, plan.slots = [0] * n, [0] * n, [0] * n
    plan.tail_at, plan.tail_end = [-1] * n, [tail_end] * n
    shape = shape or StepShape.of(plan)
    step = unpack(pack(plan, shape, pinned=False).to(pool.device), shape).step
    layout = pool.layout
    tails = torch.randn(2, 1, layout.n_kv_heads, 16, layout.head_dim).to(pool.device).half()
    heads = layout.n_kv_heads * group_heads
    q = torch.randn(shape.n_rows, heads, layout.head_dim).to(pool.device).half()
    return SlotCase(pool, groups, step, q, tails[0], tails[1], tail_end)
