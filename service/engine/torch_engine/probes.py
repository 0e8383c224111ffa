"""Forwards that only look: they store nothing and end in the layer that says what was asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from service.engine.torch_engine import attention
from service.engine.torch_engine.kv import DocumentKV
from service.engine.torch_engine.plan import PrefillDone, StepPlan

_SCORES_AT_ONCE = 1 << 22  # 16 MiB in FP32


@dataclass(slots=True)
class QueriesPlan:
    """Runs `step` as deep as the deepest of `heads`, pairs of layer and KV head, and keeps their queries.

    The step writes keys and values behind the tail, but nobody moves the tail's end.
    """

    step: StepPlan
    heads: Sequence[tuple[int, int]]
    rotation: Tensor | None = field(init=False)
    _kept: dict[tuple[int, int], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.rotation = self.step.rotation

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        kv_heads = k.shape[0]
        by_head = q.view(kv_heads, q.shape[0] // kv_heads, *q.shape[1:])
        for wanted in self.heads:
            if wanted[0] == layer:
                self._kept[wanted] = (by_head[wanted[1]] * scale).cpu()
        if layer == max(of_layer for of_layer, _ in self.heads):
            raise PrefillDone
        return self.step.attend(layer, q, k, v, scale)

    @property
    def queries(self) -> Tensor:
        """FP32 ``[len(heads), heads per KV head, rows, head_dim]``."""
        return torch.stack([self._kept[head] for head in self.heads])


@dataclass(slots=True)
class ReplayPlan:
    """Tokens that repeat [first, last) of a document, in sight of its first `sinks` tokens, of these and of themselves.

    `looks` gets per layer the largest probability of each of the tokens [first, last) over all rows and query heads of
    a KV head, FP32 ``[kv_heads, last - first]``. Keys, scores and softmax are FP32, a slice of the rows at a time.
    """

    document: DocumentKV
    sinks: int
    first: int
    last: int
    rotation: Tensor | None
    between_layers: Callable[[], None] | None
    looks: list[Tensor] = field(default_factory=list)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys = torch.cat((self._seen(self.document.k[layer]).float(), k), 1)
        values = torch.cat((self._seen(self.document.v[layer]), v.to(self.document.v.dtype)), 1)
        look = keys.new_zeros(k.shape[0], self.last - self.first)
        outs = [
            self._attend_slice(q[:, first : first + n] * scale, first, keys, values, look)
            for first, n in self._slices(q.shape[1], q.shape[0] * keys.shape[1])
        ]
        self.looks.append(look.cpu())
        if layer == self.document.memory.layout.n_layers - 1:
            raise PrefillDone
        if self.between_layers is not None:
            self.between_layers()
        return torch.cat(outs, 1)

    def _seen(self, x: Tensor) -> Tensor:
        return torch.cat((x[:, : self.sinks], x[:, self.first : self.last]), 1)

    def _slices(self, n_rows: int, row_scores: int) -> list[tuple[int, int]]:
        step = max(1, _SCORES_AT_ONCE // row_scores)
        return [(first, min(step, n_rows - first)) for first in range(0, n_rows, step)]

    def _attend_slice(self, q: Tensor, first_row: int, keys: Tensor, values: Tensor, look: Tensor) -> Tensor:
        """Output FP32 ``[heads, n, d]`` of rows [first_row, first_row + n); raises `look` where they look more."""
        kv_heads, n = keys.shape[0], q.shape[1]
        n_seen = self.sinks + look.shape[1]
        end = n_seen + first_row + n
        scores = attention.grouped_scores(attention.by_kv_head(q, kv_heads), keys[:, :end])
        own = scores[:, :, n_seen + first_row :].view(kv_heads, -1, n, n)
        own.masked_fill_(torch.ones(n, n, dtype=torch.bool, device=q.device).triu_(1), -torch.inf)
        p = torch.softmax(scores, -1)
        torch.maximum(look, p[:, :, self.sinks : n_seen].amax(1), out=look)
        return torch.bmm(p.to(values.dtype), values[:, :end]).float().reshape(q.shape)
