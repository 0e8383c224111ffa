"""Ways to keep a fixed number of a document's rows without knowing the questions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.fidelity_parts import hybrid
from benchmarks.fidelity_parts.reader import KV, Kept
from benchmarks.fidelity_parts.replays import N_SINKS, Looked
from benchmarks.fidelity_parts.selection import select_layered, select_uniform
from ingest.compaction import select_ragged

WINDOW_TOKENS = 128
_HELD_OUT_EVERY, _HELD_OUT_ROWS = 320, 64
_MOST_QUERIES = 4096


@dataclass(frozen=True, slots=True)
class Budget:
    """Rows per head of a document of `n` tokens kept at a ratio: sinks, slots and window together are ``n / ratio``."""

    n: int
    ratio: int
    sinks: int
    slots: int
    window: int

    @classmethod
    def of(cls, n: int, ratio: int) -> "Budget":
        rows = n // ratio
        sinks = min(N_SINKS, rows // 4)
        window = min(WINDOW_TOKENS, rows // 4)
        return cls(n, ratio, sinks, rows - sinks - window, window)

    @property
    def rows(self) -> int:
        return self.sinks + self.slots + self.window

    def always(self, device: torch.device) -> Tensor:
        """Sinks and window: bool ``[n]``."""
        tokens = torch.arange(self.n, device=device)
        return (tokens < self.sinks) | (tokens >= self.n - self.window)


def only_always(kv: KV, always: Tensor) -> Kept:
    """Those rows and no other, in every head."""
    layers, heads = kv.k.shape[:2]
    rows = always.nonzero()[:, 0].expand(heads, -1)
    return Kept([rows] * layers, always)


def window(kv: KV, budget: Budget) -> Kept:
    """Sinks and the last tokens (StreamingLLM, Xiao et al., 2023), as many rows as the others keep."""
    tokens = torch.arange(budget.n, device=kv.k.device)
    return only_always(kv, (tokens < budget.sinks) | (tokens >= budget.n - budget.slots - budget.window))


def key_norm_scores(kv: KV) -> Tensor:
    """Keys of small norm get much attention (Devoto et al., 2024)."""
    return -kv.k.norm(dim=-1)


def uniform(kv: KV, scores: Tensor, budget: Budget) -> Kept:
    """The best rows of every head, equally many in all."""
    always = budget.always(kv.k.device)
    middle = (~always).nonzero()[:, 0]
    chosen = middle[select_uniform(scores[..., middle], budget.slots)]
    return Kept(_with_always(list(chosen), always), always)


def layered(kv: KV, scores: Tensor, budget: Budget, *, best_head: bool = False) -> Kept:
    """More rows for layers with higher scores."""
    always = budget.always(kv.k.device)
    return Kept(_with_always(_layered(scores, budget, best_head=best_head), always), always)


def _layered(scores: Tensor, budget: Budget, *, best_head: bool = False) -> list[Tensor]:
    middle = (~budget.always(scores.device)).nonzero()[:, 0]
    return [middle[rows] for rows in select_layered(scores[..., middle], budget.slots, best_head=best_head)]


def ragged(kv: KV, scores: Tensor, budget: Budget) -> Kept:
    """One threshold over all heads of all layers, the paper's choice: heads of a layer keep unequal numbers, which
    needs attention over ragged rows."""
    always = budget.always(kv.k.device)
    middle = (~always).nonzero()[:, 0]
    kept = always.repeat(*scores.shape[:2], 1)
    for of_layer, places in zip(kept, select_ragged(scores[..., middle], budget.slots), strict=True):
        for of_head, own in zip(of_layer, places, strict=True):
            of_head[middle[own]] = True
    heads, rows, bias = scores.shape[1], [], []
    for of_layer in kept:
        there, at = of_layer.int().sort(dim=-1, descending=True, stable=True)
        most = int(of_layer.sum(-1).max())
        rows.append(at[:, :most])
        bias.append(torch.zeros(heads, most, device=scores.device).masked_fill(there[:, :most] == 0, -torch.inf))
    return Kept(rows, always, bias)


def _with_always(chosen: list[Tensor], always: Tensor) -> list[Tensor]:
    fixed = always.nonzero()[:, 0]
    return [torch.cat((rows, fixed.expand(len(rows), -1)), 1) for rows in chosen]


@dataclass(frozen=True, slots=True)
class Fit:
    """How a hybrid is fitted; see `hybrid.choose`."""

    shares: tuple[float, ...] = hybrid.SHARES
    ridges: tuple[float, ...] = hybrid.RIDGES
    biased: bool = True
    replay: str = "replay"
    """Whose queries it is fitted on; the exact rows are always those of the first replay."""
    layered: bool = False
    """More slots for layers with higher scores."""
    all_ratios: bool = False
    """At every ratio, not only where the choice is made."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A hybrid's rows, the share of exact slots that each head chose, and held-out errors with it and with selection
    alone, all ``[layers][heads]``."""

    kept: Kept
    exact: list[list[float]]
    error: list[list[float]]
    selected: list[list[float]]


def fitted(kv: KV, scores: Tensor, looked: Looked, budget: Budget, how: Fit) -> Fitted:
    """Exact slots and a fitted remainder, layer by layer."""
    always = budget.always(kv.k.device)
    n_fixed = int(always.sum())
    held = torch.arange(len(looked.chunks), device=kv.k.device) % _HELD_OUT_EVERY < _HELD_OUT_ROWS
    layers = []
    own = [rows.shape[1] for rows in _layered(scores, budget)] if how.layered else [budget.slots] * len(scores)
    for layer, queries in enumerate(looked.queries):
        source = hybrid.LayerKV(
            kv.k[layer],
            kv.v[layer],
            scores[layer],
            always,
            _thinned(queries[:, :, ~held].flatten(1, 2)),
            _thinned(queries[:, :, held].flatten(1, 2)),
        )
        layers.append(hybrid.choose(source, own[layer], shares=how.shares, ridges=how.ridges, biased=how.biased))
    bias = [torch.cat((s.bias, s.bias.new_zeros(len(s.bias), n_fixed)), 1) for s in layers]
    values = [torch.cat((s.values, kv.v[layer][:, always]), 1) for layer, s in enumerate(layers)]
    kept = Kept(_with_always([s.rows for s in layers], always), always, bias, values)
    return Fitted(kept, [s.exact for s in layers], [s.error for s in layers], [s.selected for s in layers])


def _thinned(queries: Tensor) -> Tensor:
    """At most so many rows, evenly spread."""
    step = -(-queries.shape[1] // _MOST_QUERIES)
    return queries[:, ::step]
