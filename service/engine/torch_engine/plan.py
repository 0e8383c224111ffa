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

from cache_store.codec import decode_records, encode_records
from service.engine.models.light_transformers import AttentionInterface
from service.engine.torch_engine import attention
from service.engine.torch_engine.few import FewRows, Share, TailRows, few_rows
from service.engine.torch_engine.kv import DocumentKV, Tail
from service.engine.torch_engine.scratch import Scratch

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
    """New tokens of several sequences, each behind its document and its own tail. `scratch` is used by one plan at a
    time. Of the layers in `taken` the queries of `rows` are put there, ``[heads, len(rows), head_dim]``."""

    groups: list[Group]
    rotation: Tensor | None
    scratch: Scratch = field(default_factory=Scratch)
    taken: dict[int, Tensor | None] = field(default_factory=dict)
    rows: Tensor | None = None
    _queries: Tensor | None = None
    _steps: list["_GroupStep"] = field(default_factory=list)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self.attend_scaled(layer, q * scale, k, v)

    def attend_scaled(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `attend`, for queries that are scaled already."""
        self.bind(q, k, v)
        return self.attend_bound(layer)

    def bind(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Say where scaled queries, keys and values will be: `attend_bound` takes them from there in every layer."""
        if not self._steps:
            self._steps = [_GroupStep(group, q.shape[0], k.shape[0], self.scratch) for group in self.groups]
        for step in self._steps:
            step.bind(q, k, v)
        self._queries = q

    def attend_bound(self, layer: int) -> Tensor:
        """As `attend`, with what is bound. The output may be overwritten by the next call."""
        if layer in self.taken:
            self._take(layer)
        if len(self._steps) == 1:
            return self._steps[0].attend(layer)
        return torch.cat([step.attend(layer) for step in self._steps], 1)

    def _take(self, layer: int) -> None:
        assert self._queries is not None
        assert self.rows is not None
        self.taken[layer] = self._queries.index_select(1, self.rows)


class _GroupStep:
    """One group's attention in a step. `FewRows` take the scratch memory of another group's: call `attend` of the
    groups one after the other."""

    def __init__(self, group: Group, heads: int, kv_heads: int, scratch: Scratch) -> None:
        self._group, self._kv_heads = group, kv_heads
        self._tails = [TailRows(m.tail, m.n - m.refeed) for m in group.members]
        self._few = None
        if group.document is not None and few_rows(group.document, group.n, heads):
            members = zip(group.members, self._tails, strict=True)
            shares = [Share(tail, m.first - group.first, m.n, m.mask) for m, tail in members]
            self._few = FewRows(group.document, shares, heads, kv_heads, scratch)

    def bind(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Say where all groups' queries, keys and values are, for the calls of `attend` that follow."""
        self._q = q[:, self._group.first : self._group.first + self._group.n]
        self._new = []
        for member in self._group.members:
            # The re-fed token's are the document's already.
            new = slice(member.first + member.refeed, member.first + member.n)
            self._new.append((k[:, new], v[:, new]))

    def attend(self, layer: int) -> Tensor:
        """Write the new keys and values, attend: this group's output."""
        for tail, (k, v) in zip(self._tails, self._new, strict=True):
            tail.new_keys[layer].copy_(k)
            tail.new_values[layer].copy_(v)
        own = self._q
        if self._few is not None:
            return self._few.attend(layer, own)
        outs, lses = zip(*(self._tail_only(layer, i, own) for i in range(len(self._tails))), strict=True)
        tails = torch.cat(outs, 1), torch.cat(lses, 1)
        return tails[0] if self._group.document is None else self._merged(layer, self._group.document, own, *tails)

    def _tail_only(self, layer: int, i: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Output ``[heads, n, d]`` and log-sum-exp ``[heads, n]`` of one sequence's rows over its tail."""
        member, tail = self._group.members[i], self._tails[i]
        first = member.first - self._group.first
        own = q[:, first : first + member.n]
        rows = attention.by_kv_head(own, self._kv_heads)
        out, lse = attention.masked(rows, tail.keys[layer], tail.values[layer], member.mask)
        return out.reshape(own.shape), lse.reshape(own.shape[:2])

    def _merged(self, layer: int, document: DocumentKV, q: Tensor, tail: Tensor, tail_lse: Tensor) -> Tensor:
        n = document.n_tokens
        k, v = (x[:, :n] for x in document.layer(layer))
        rows = attention.by_kv_head(q, self._kv_heads)
        out, lse = attention.flash(rows, k, v, 1.0)
        if document.slots is not None:
            out, lse = attention.merge(out, lse, *document.slots.attend(layer, rows))
        return attention.merge(out.reshape(q.shape), lse.reshape(q.shape[:2]), tail, tail_lse)[0]
