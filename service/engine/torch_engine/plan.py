"""What one forward does in every layer: which rows belong to whom, and where their KV goes.

transformers calls `preread_attention` (registered with its AttentionInterface) in each layer with the new tokens'
queries, keys and values; the plan of the forward travels with the call as a keyword, so nothing here is global
and a forward may run while another one waits between two of its layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from cache_store.codec import decode_records, encode_records
from service.engine.torch_engine import attention
from service.engine.torch_engine.kv import DocumentKV, Tail

NAME = "preread"


class Plan(Protocol):
    """Attention of one layer: rotated queries ``[heads, n, d]``, keys and values ``[kv_heads, n, d]`` in; output
    FP32 ``[heads, n, d]`` in the same space."""

    rotation: Tensor | None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor: ...


class PrefillDone(Exception):
    """Raised out of a document chunk's forward in the last layer: its KV is stored, and nobody wants logits."""


def preread_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    plan: Plan,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention transformers calls: ``[1, heads, n, d]`` in, ``[1, n, heads, d]`` out."""
    heads, kv_heads = query.shape[1], key.shape[1]
    qkv = torch.cat((query[0], key[0], value[0])).float()
    if plan.rotation is not None:
        qkv = qkv @ plan.rotation
    q, k, v = qkv.split((heads, kv_heads, kv_heads))
    out = plan.attend(cast(int, module.layer_idx), q, k, v, scaling)
    if plan.rotation is not None:
        out = out @ plan.rotation
    return out.transpose(0, 1)[None].to(query.dtype), None


AttentionInterface.register(NAME, preread_attention)


@dataclass(slots=True)
class PrefillPlan:
    """A chunk of a document: it attends to the decoded past and, causally, to itself as computed; then it is
    encoded, and the document keeps its decoded form."""

    document: DocumentKV
    rotation: Tensor | None
    between_layers: Callable[[], None] | None
    records: list[list[memoryview]] = field(default_factory=list)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self._store(layer, k, v)
        if layer == self.document.memory.layout.n_layers - 1:
            raise PrefillDone
        out = self._attend(layer, q, k, v, scale)
        if self.between_layers is not None:
            self.between_layers()
        return out

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        document, kv_heads = self.document, k.shape[0]
        dtype = document.memory.value_dtype
        out, lse = attention.causal_flash(q, k.to(dtype), v.to(dtype), scale)
        if not document.n_tokens:
            return out
        past_k, past_v = (x[layer, :, : document.n_tokens] for x in (document.k, document.v))
        past, past_lse = attention.flash(attention.by_kv_head(q, kv_heads), past_k, past_v, scale)
        return attention.merge(out, lse, past.reshape(out.shape), past_lse.reshape(lse.shape))[0]

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        document = self.document
        layout = document.memory.layout
        records = encode_records(k.cpu(), v.cpu(), layout, rotated=self.rotation is not None)
        self.records.append(records)
        first, n = document.n_tokens, k.shape[1]
        whole = torch.frombuffer(bytearray().join(records), dtype=torch.uint8).to(k.device)
        decode_records(
            whole,
            n,
            layout,
            out_k=document.k[layer, :, first : first + n],
            out_v=document.v[layer, :, first : first + n],
            rotated=self.rotation is not None,
        )


@dataclass(slots=True)
class SequenceRows:
    """The rows ``[first, first + n)`` of a forward that belong to one sequence."""

    tail: Tail
    first: int
    n: int
    refeed: bool
    mask: Tensor | None


@dataclass(slots=True)
class Group:
    """Neighbouring rows of sequences on the same document (or on none): it is read once for all of them."""

    document: DocumentKV | None
    members: list[SequenceRows]

    @property
    def first(self) -> int:
        return self.members[0].first

    @property
    def n(self) -> int:
        return sum(m.n for m in self.members)


@dataclass(slots=True)
class StepPlan:
    """New tokens of several sequences, each behind its document and its own tail."""

    groups: list[Group]
    rotation: Tensor | None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        for group in self.groups:
            for member in group.members:
                _append(layer, member, k, v)
        q = q * scale
        outs = [_attend_group(layer, g, q[:, g.first : g.first + g.n], k.shape[0]) for g in self.groups]
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _append(layer: int, rows: SequenceRows, k: Tensor, v: Tensor) -> None:
    """Write a sequence's new keys and values behind its tail; the re-fed token's are the document's already."""
    first, n = rows.first + rows.refeed, rows.n - rows.refeed
    at = rows.tail.length
    rows.tail.k[layer, :, at : at + n] = k[:, first : first + n]
    rows.tail.v[layer, :, at : at + n] = v[:, first : first + n]


def _tail(layer: int, rows: SequenceRows) -> tuple[Tensor, Tensor]:
    end = rows.tail.length + rows.n - rows.refeed
    return rows.tail.k[layer, :, :end], rows.tail.v[layer, :, :end]


def _attend_group(layer: int, group: Group, q: Tensor, kv_heads: int) -> Tensor:
    if group.document is None:
        return torch.cat([_tail_only(layer, m, q, group.first, kv_heads)[0] for m in group.members], 1)
    if group.n <= attention.FEW_ROWS:
        return _attend_few(layer, group, group.document, q, kv_heads)
    return _attend_many(layer, group, group.document, q, kv_heads)


def _tail_only(layer: int, rows: SequenceRows, q: Tensor, base: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Output ``[heads, n, d]`` and log-sum-exp ``[heads, n]`` of one sequence's rows over its tail."""
    own = q[:, rows.first - base : rows.first - base + rows.n]
    k, v = _tail(layer, rows)
    out, lse = attention.masked(attention.by_kv_head(own, kv_heads), k, v, rows.mask)
    return out.reshape(own.shape), lse.reshape(own.shape[:2])


def _attend_many(layer: int, group: Group, document: DocumentKV, q: Tensor, kv_heads: int) -> Tensor:
    n = document.n_tokens
    out, lse = attention.flash(
        attention.by_kv_head(q, kv_heads), document.k[layer, :, :n], document.v[layer, :, :n], 1.0
    )
    tails = [_tail_only(layer, m, q, group.first, kv_heads) for m in group.members]
    tail_out, tail_lse = (torch.cat(parts, 1) for parts in zip(*tails, strict=True))
    return attention.merge(out.reshape(q.shape), lse.reshape(q.shape[:2]), tail_out, tail_lse)[0]


def _attend_few(layer: int, group: Group, document: DocumentKV, q: Tensor, kv_heads: int) -> Tensor:
    """One softmax over document and tail scores side by side: fewer operations than merging two results."""
    # Sizes are spelt out below: a probe that only re-feeds the document's last token has a tail of no tokens at
    # all, and from no elements torch cannot infer a size.
    heads, n_rows, d = q.shape
    n, group_heads = document.n_tokens, heads // kv_heads
    rows = attention.by_kv_head(q, kv_heads)
    tails = [_tail(layer, m) for m in group.members]
    longest = max(k.shape[1] for k, _ in tails)
    scores = torch.cat(
        (
            attention.document_scores(rows, document.k[layer], n),
            rows.new_full((*rows.shape[:2], longest), -torch.inf),
        ),
        -1,
    )
    by_row = scores.view(kv_heads, group_heads, n_rows, n + longest)
    grouped_q = rows.view(kv_heads, group_heads, n_rows, d)
    for m, (k, _) in zip(group.members, tails, strict=True):
        at = slice(m.first - group.first, m.first - group.first + m.n)
        own = grouped_q[:, :, at].reshape(kv_heads, -1, d)
        part = attention.grouped_scores(own, k).view(kv_heads, group_heads, m.n, k.shape[1])
        by_row[:, :, at, n : n + k.shape[1]] = part if m.mask is None else part + m.mask
    p = torch.softmax(scores, -1)
    out = attention.document_values(p[..., :n], document.v[layer], n).view(kv_heads, -1, n_rows, d)
    p_rows = p.view(by_row.shape)
    for m, (_, v) in zip(group.members, tails, strict=True):
        at = slice(m.first - group.first, m.first - group.first + m.n)
        own = p_rows[:, :, at, n : n + v.shape[1]].reshape(kv_heads, group_heads * m.n, v.shape[1])
        out[:, :, at] += torch.bmm(own.to(v.dtype), v).view(kv_heads, -1, m.n, d)
    return out.reshape(heads, n_rows, d)
