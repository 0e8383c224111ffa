"""Random decode steps over encoded documents and private tails, and their attention in FP64."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from cache_store.codec import decode_records, encode_records, rotate
from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.step import Step

NAN_BYTE = 0xFF


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step: its slot and how much of that tail it sees."""

    slot: int
    tail_end: int


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of `attend`, and the decoded KV ``[kv_heads, n, dim]`` of every group's document."""

    step: Step
    q: Tensor
    pool: Tensor
    tail_k: Tensor
    tail_v: Tensor
    scale: float
    layout: KVLayout
    bias: Tensor | None
    documents: list[tuple[Tensor, Tensor, list[int]]]

    def arguments(self):
        return self.step, self.q, self.pool, self.tail_k, self.tail_v, self.scale, self.layout, self.bias

    def reference(self) -> Tensor:
        """FP64 ``[rows, heads, dim]``; zeros where a row sees nothing or belongs to no group."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=self.q.device)
        bounds = self.step.group_rows.tolist()
        for g, (first, last) in enumerate(itertools.pairwise(bounds)):
            for row in range(first, last):
                out[row] = self._row(row, *self.documents[g])
        if self.layout.kv_type is KVType.FP16:
            return out
        return out @ rotate(torch.eye(self.layout.head_dim, device=out.device)).double()

    def _row(self, row: int, doc_k: Tensor, doc_v: Tensor, blocks: list[int]) -> Tensor:
        slot, end = int(self.step.slots[row]), int(self.step.tail_end[row])
        k = torch.cat((doc_k.double(), self.tail_k[slot, :, :end].double()), 1)
        v = torch.cat((doc_v.double(), self.tail_v[slot, :, :end].double()), 1)
        if not k.shape[1]:
            return torch.zeros(self.q.shape[1:], dtype=torch.float64, device=k.device)
        q = self.q[row].double().view(k.shape[0], -1, k.shape[2])
        scores = q @ k.transpose(1, 2) * self.scale
        n = doc_k.shape[1]
        if self.bias is not None and n:
            bias = self.bias[blocks].transpose(0, 1).flatten(1)[:, :n]
            scores[:, :, :n] += bias.double()[:, None]
        return (torch.softmax(scores, -1) @ v).flatten(0, 1)


def make_case(
    layout: KVLayout,
    group_heads: int,
    groups: list[tuple[int, list[Row]]],
    *,
    seed: int = 0,
    device: str = "cpu",
    padding: int = 0,
    tail_tokens: int = 64,
    n_slots: int = 4,
    biased: bool = False,
) -> Case:
    """A step of `groups` (document tokens, rows), `padding` rows behind them and as many empty groups. Everything in
    the pool and in the tails that no row may see is NaN."""
    torch.manual_seed(seed)
    h, d = layout.n_kv_heads, layout.head_dim
    counts = [layout.n_blocks(tokens) for tokens, _ in groups]
    n_blocks = sum(counts) + 3
    order = torch.randperm(n_blocks, device=device)
    pool = torch.full((n_blocks, layout.record_nbytes(256)), NAN_BYTE, dtype=torch.uint8, device=device)
    tables = torch.full((len(groups) + padding, max(counts, default=0) + 1), n_blocks + 9, device=device)
    documents, at = [], 0
    for g, ((tokens, _), count) in enumerate(zip(groups, counts, strict=True)):
        blocks = order[at : at + count]
        tables[g, :count] = blocks
        at += count
        documents.append((*fill(layout, pool, blocks, tokens), blocks.tolist()))
    rows = [row for _, group in groups for row in group]
    tail_k, tail_v = tails_of(rows, (n_slots, h, tail_tokens, d), device)
    bounds = torch.tensor([0, *(len(group) for _, group in groups), *[0] * padding]).cumsum(0)
    filler = [Row(0, 0)] * padding
    step = Step(
        positions=ints([0] * (len(rows) + padding), device),
        slots=ints([row.slot for row in rows + filler], device),
        tail_at=ints([-1] * (len(rows) + padding), device),
        tail_end=ints([row.tail_end for row in rows + filler], device),
        group_rows=bounds.to(device, torch.int32),
        group_tokens=ints([tokens for tokens, _ in groups] + [0] * padding, device),
        block_tables=tables.to(torch.int32),
        max_group_rows=max([len(group) for _, group in groups] + [1]),
        max_tokens=max(tokens for tokens, _ in groups),
        max_tail=max([row.tail_end for row in rows] + [0]),
    )
    q = torch.randn(len(rows) + padding, h * group_heads, d, device=device).half()
    bias = torch.randn(n_blocks, h, 256, device=device).half() if biased else None
    return Case(step, q, pool, tail_k, tail_v, d**-0.5 * 1.5, layout, bias, documents)


def ints(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def tails_of(rows: list[Row], shape: tuple[int, int, int, int], device: str) -> tuple[Tensor, Tensor]:
    """Random tails, NaN behind the last token that a row of the slot sees."""
    tail_k, tail_v = (torch.randn(shape, device=device).half() for _ in range(2))
    for slot in range(shape[0]):
        end = max([row.tail_end for row in rows if row.slot == slot], default=0)
        tail_k[slot, :, end:] = tail_v[slot, :, end:] = torch.nan
    return tail_k, tail_v


def fill(layout: KVLayout, pool: Tensor, blocks: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Encodes random KV into blocks of the pool; gives it decoded, FP32 ``[kv_heads, tokens, dim]``."""
    h, d = layout.n_kv_heads, layout.head_dim
    shape = (h, len(blocks) * 256, d)
    spread = torch.rand(h, 1, d, device=pool.device) * 2
    k, v = torch.randn(shape, device=pool.device) * spread, torch.randn(shape, device=pool.device)
    out_k, out_v = (torch.empty(shape, device=pool.device) for _ in range(2))
    if tokens:
        records = encode_records(k, v, layout, rotated=layout.kv_type is not KVType.FP16)
        pool[blocks] = torch.stack([torch.frombuffer(r, dtype=torch.uint8) for r in records]).to(pool.device)
        rotated = layout.kv_type is not KVType.FP16
        decode_records(pool[blocks].flatten(), shape[1], layout, out_k=out_k, out_v=out_v, rotated=rotated)
        poison_last(layout, pool[int(blocks[-1])], tokens % 256 or 256)
    return out_k[:, :tokens], out_v[:, :tokens]


def poison_last(layout: KVLayout, record: Tensor, used: int) -> None:
    at = 0
    for nbytes in layout.part_nbytes(256):
        record[at : at + nbytes].view(layout.n_kv_heads, 256, -1)[:, used:] = NAN_BYTE
        at += nbytes


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Largest over vectors of |difference| / |reference|; NaN and values where there should be zeros give infinity."""
    gap = (out.double() - reference).norm(dim=-1)
    size = reference.norm(dim=-1)
    worst = torch.where(size > 0, gap / size.clamp(min=1e-30), torch.where(gap == 0, 0.0, torch.inf))
    return float(worst.nan_to_num(torch.inf).max())
