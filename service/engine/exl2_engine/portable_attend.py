"""Decode attention in plain torch, for cards that Triton does not reach (sm_70, sm_75) and for the processor.

A document's blocks are decoded a few at a time into FP32 (storage stays as it is in the pool, tails in the compute
dtype), heads of a group share one product, and parts are merged by their log-sum-exp.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cache_store.codec import rotate
from cache_store.layout import BLOCK_TOKENS, KVLayout, KVType
from service.engine.exl2_engine.portable_records import decode_blocks, decoded, record_parts
from service.engine.exl2_engine.slots import LayerSlots
from service.engine.exl2_engine.step import Step

_DECODED_VALUES = 1 << 22
_SCORES = 1 << 24
"""Bounds of the FP32 scratch: values decoded at a time, and scores over them."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows ``[first, last)`` over `n_tokens` tokens of a document; host numbers."""

    index: int
    first: int
    last: int
    n_tokens: int
    slot_first: int


def attend(
    step: Step,
    q: Tensor,
    pool: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    scale: float,
    layout: KVLayout,
    bias: Tensor | None = None,
    slots: LayerSlots | None = None,
) -> Tensor:
    """`KVBackend.attend` for any device and floating dtype of `q` and the tails. It reads the step's lengths back from
    the device, so it cannot be captured in a CUDA graph."""
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    groups, of_rows, ends = _lengths(step)
    for group in groups:
        rows = slice(group.first, group.last)
        queries = _by_kv_head(q[rows].float() * scale, layout.n_kv_heads)
        per_row = queries.shape[1] // (group.last - group.first)
        merged = _Merged(queries)
        for k, v, added in _document(step, group, pool, layout, bias, queries.shape[1]):
            merged.add(slice(None), k, v, added)
        if group.slot_first and slots is not None:
            for k, v, added in _slots(step, group, slots, layout):
                merged.add(slice(None), k, v, added)
        for first, last in _runs(of_rows, group):
            end = max(ends[first:last])
            k, v = (tail[of_rows[first], :, :end].float() for tail in (tail_k, tail_v))
            some = slice((first - group.first) * per_row, (last - group.first) * per_row)
            merged.add(some, k, v, _hidden(step.tail_end[first:last], end, per_row))
        out[rows] = _by_row(merged.out, group.last - group.first)
    return (out if layout.kv_type is KVType.FP16 else rotate(out)).to(q.dtype)


class _Merged:
    """Attention of queries ``[kv_heads, n, dim]``, FP32 and scaled, over keys that come in parts."""

    def __init__(self, queries: Tensor) -> None:
        self._queries = queries
        self.out = torch.zeros_like(queries)
        self._lse = queries.new_full(queries.shape[:2], -math.inf)

    def add(self, some: slice, k: Tensor, v: Tensor, added: Tensor | None) -> None:
        """Let the queries `some` see keys and values ``[kv_heads, t, dim]``; `added` goes onto their scores."""
        scores = torch.bmm(self._queries[:, some], k.transpose(1, 2))
        if added is not None:
            scores += added
        part_lse = scores.logsumexp(-1)
        lse = torch.logaddexp(self._lse[:, some], part_lse)
        safe = lse.masked_fill(lse == -math.inf, 0.0)[..., None]
        faded = torch.exp(self._lse[:, some, None] - safe)
        self.out[:, some] = self.out[:, some] * faded + torch.bmm(scores.sub_(safe).exp_(), v)
        self._lse[:, some] = lse


def _lengths(step: Step) -> tuple[list[_Group], list[int], list[int]]:
    """The groups that have rows, and every row's slot and end of tail, in one copy from the device."""
    g, r = step.n_groups, step.n_rows
    slot_first = torch.zeros_like(step.group_tokens) if step.slot_first is None else step.slot_first
    parts = step.group_rows, step.group_tokens, slot_first, step.slots, step.tail_end
    numbers: list[int] = torch.cat(parts).tolist()
    bounds, tokens, first = numbers[: g + 1], numbers[g + 1 : 2 * g + 1], numbers[2 * g + 1 : 3 * g + 1]
    groups = [_Group(i, bounds[i], bounds[i + 1], tokens[i], first[i]) for i in range(g) if bounds[i] < bounds[i + 1]]
    return groups, numbers[3 * g + 1 : 3 * g + 1 + r], numbers[3 * g + 1 + r :]


def _document(
    step: Step, group: _Group, pool: Tensor, layout: KVLayout, bias: Tensor | None, n_queries: int
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Keys, values and bias ``[kv_heads, 1, t]`` of a group's document, some blocks at a time."""
    values = layout.n_kv_heads * layout.head_dim * BLOCK_TOKENS
    most = min(_DECODED_VALUES // values, _SCORES // (layout.n_kv_heads * n_queries * BLOCK_TOKENS))
    table = step.block_tables[group.index, : layout.n_blocks(group.n_tokens)].long()
    shape = (layout.n_kv_heads, min(max(most, 1), len(table)) * BLOCK_TOKENS, layout.head_dim)
    k, v = (torch.empty(shape, dtype=torch.float32, device=pool.device) for _ in range(2))
    for at in range(0, len(table), max(most, 1)):
        blocks = table[at : at + max(most, 1)]
        n = min(group.n_tokens - at * BLOCK_TOKENS, len(blocks) * BLOCK_TOKENS)
        added = None if bias is None else bias[blocks].transpose(0, 1).flatten(1)[:, None, :n].float()
        decode_blocks(pool, blocks, n, layout, k, v)
        yield k[:, :n], v[:, :n], added


def _slots(step: Step, group: _Group, slots: LayerSlots, layout: KVLayout) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Keys and values of a group's slots, and what hides those that a head does not have, as `_document` gives them:
    the pages of all heads side by side, as many as the head with most has, some at a time."""
    heads, page = layout.n_kv_heads, layout.block_tokens
    blocks = step.block_tables[group.index, group.slot_first :].long()
    counts, starts = slots.table[blocks[0], slots.layer].long().unbind(-1)
    most = int((counts.max() + page - 1) // page)
    at_once = max(_DECODED_VALUES // (heads * page * layout.head_dim), 1)
    for first in range(0, most, at_once):
        pages = starts[:, None] + torch.arange(first, min(first + at_once, most), device=starts.device)
        places = torch.arange(first * page, first * page + page * pages.shape[1], device=starts.device)
        hidden = places >= counts[:, None]
        # A head that has fewer pages reads its first ones again, where nothing is seen.
        pages = torch.where(hidden[:, ::page], starts[:, None], pages)
        pages = torch.where(counts[:, None] > 0, pages, 0)
        k, v = slot_pages(slots.records, blocks, pages, layout)
        added = torch.zeros(hidden.shape, device=starts.device).masked_fill_(hidden, -math.inf)
        yield k.masked_fill_(hidden[..., None], 0.0), v.masked_fill_(hidden[..., None], 0.0), added[:, None]


def slot_pages(records: Tensor, blocks: Tensor, pages: Tensor, layout: KVLayout) -> tuple[Tensor, Tensor]:
    """Keys and values FP32 ``[kv_heads, 256 n, dim]`` of pages ``[kv_heads, n]`` of a document's blocks of slots."""
    n_heads = layout.n_layers * layout.n_kv_heads
    layer, head = (pages % n_heads) // layout.n_kv_heads, pages % layout.n_kv_heads
    record = layer * records.shape[1] + blocks[pages // n_heads]
    parts = [part[record, head] for part in record_parts(records.flatten(0, 1), layout)]
    bits = layout.kv_type.key_bits, layout.kv_type.value_bits
    k, v = (decoded(c, s, b).float().flatten(1, 2) for c, s, b in zip(parts[::2], parts[1::2], bits, strict=True))
    return k, v


def _runs(slots: list[int], group: _Group) -> Iterator[tuple[int, int]]:
    """Rows of the group with one slot, side by side."""
    first = group.first
    for row in range(group.first + 1, group.last + 1):
        if row == group.last or slots[row] != slots[first]:
            yield first, row
            first = row


def _hidden(ends: Tensor, n_keys: int, per_row: int) -> Tensor:
    """``[1, rows * per_row, n_keys]``: -inf for keys that a row does not see."""
    keys = torch.arange(n_keys, device=ends.device)
    hidden = keys >= ends.repeat_interleave(per_row)[:, None]
    return torch.zeros(hidden.shape, device=ends.device).masked_fill_(hidden, -math.inf)[None]


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """``[rows, heads, dim]`` as ``[kv_heads, rows * heads per KV head, dim]``, row-major."""
    rows, heads, dim = x.shape
    return x.view(rows, kv_heads, heads // kv_heads, dim).transpose(0, 1).reshape(kv_heads, -1, dim)


def _by_row(x: Tensor, rows: int) -> Tensor:
    kv_heads, _, dim = x.shape
    return x.view(kv_heads, rows, -1, dim).transpose(0, 1).reshape(rows, -1, dim)
