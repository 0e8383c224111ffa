"""Summary slots of one layer, part exact rows and part fitted remainder, chosen head by head.

A share of the slots keeps the rows that a replay looks at most, as they are; the rest stands for all other rows. Which
share is best, and how strongly refitted values are pulled towards the rows' own, is decided for each head on queries
that were not fitted on; a head for which nothing beats plain selection keeps that. Pure tensor math.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.fidelity_parts import attention_matching as matching
from benchmarks.fidelity_parts.attention_matching import Part

RIDGES = (1e-3, 1e-2, 1e-1)
SHARES = (0.75, 0.5, 0.25)


@dataclass(frozen=True, slots=True)
class LayerSlots:
    """`rows`: places in the document, int64 ``[heads, t]``, exact ones first. `bias` ``[heads, t]``, `values`
    ``[heads, t, d]``. `exact`: the share of exact slots that each head chose, 1 for plain selection; `error`: relative
    squared error of the attention output on held-out queries with it, and `selected`, that of plain selection."""

    rows: Tensor
    bias: Tensor
    values: Tensor
    exact: list[float]
    error: list[float]
    selected: list[float]


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What the slots of one layer are made from.

    `keys`, `values`: ``[heads, n, d]``; `scores` ``[heads, n]`` by replay; `always`: rows that stay anyway (sinks and
    window), bool ``[n]``; `fit_on`, `held_out`: scaled queries ``[heads, rows, d]``.
    """

    keys: Tensor
    values: Tensor
    scores: Tensor
    always: Tensor
    fit_on: Tensor
    held_out: Tensor


def choose(
    kv: LayerKV,
    n_slots: int,
    *,
    shares: Sequence[float] = SHARES,
    ridges: Sequence[float] = RIDGES,
    biased: bool = True,
) -> LayerSlots:
    """The best slots for every head. `shares`: of exact slots, tried beside 1; `ridges`: see
    `attention_matching.fit`."""
    ranked = kv.scores.masked_fill(kv.always, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    others = ranked[:, : int((~kv.always).sum())]
    whole = matching.attend(kv.held_out, kv.keys, kv.values)
    best = _selection(kv, others[:, :n_slots], whole)
    selected = best.error
    for candidate in _candidates(kv, others, n_slots, shares, ridges, biased, whole):
        best = _better(best, candidate)
    return LayerSlots(best.rows, best.bias, best.values, best.exact.tolist(), best.error.tolist(), selected.tolist())


@dataclass(frozen=True, slots=True)
class _Candidate:
    rows: Tensor
    bias: Tensor
    values: Tensor
    exact: Tensor
    error: Tensor


def _better(a: _Candidate, b: _Candidate) -> _Candidate:
    """Head by head; a tie goes to the first."""
    take = b.error < a.error
    return _Candidate(
        torch.where(take[:, None], b.rows, a.rows),
        torch.where(take[:, None], b.bias, a.bias),
        torch.where(take[:, None, None], b.values, a.values),
        torch.where(take, b.exact, a.exact),
        torch.where(take, b.error, a.error),
    )


def _take(x: Tensor, rows: Tensor) -> Tensor:
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


def _selection(kv: LayerKV, rows: Tensor, whole: Part) -> _Candidate:
    values = _take(kv.values, rows)
    bias = torch.zeros_like(rows, dtype=kv.keys.dtype)
    return _candidate(kv, rows, bias, values, 1.0, whole)


def _candidate(kv: LayerKV, rows: Tensor, bias: Tensor, values: Tensor, exact: float, whole: Part) -> _Candidate:
    fixed = matching.attend(kv.held_out, kv.keys[:, kv.always], kv.values[:, kv.always])
    slots = matching.attend(kv.held_out, _take(kv.keys, rows), values, bias)
    wrong = matching.merge(fixed, slots).out - whole.out
    error = (wrong.square().sum(-1) / whole.out.square().sum(-1).clamp_min(1e-20)).mean(-1)
    return _Candidate(rows, bias, values, torch.full_like(error, exact), error)


def _candidates(
    kv: LayerKV,
    others: Tensor,
    n_slots: int,
    shares: Sequence[float],
    ridges: Sequence[float],
    biased: bool,
    whole: Part,
) -> Iterator[_Candidate]:
    for share in shares:
        n_exact = round(share * n_slots)
        if n_exact == n_slots:
            continue
        exact, rest = others[:, :n_exact], others[:, n_exact:].sort(-1).values
        keys, values = _take(kv.keys, rest), _take(kv.values, rest)
        weights = _weights(kv, exact, keys, values)
        tried = matching.fit(keys, values, kv.fit_on, weights, n_slots - n_exact, ridges=ridges, biased=biased)
        for fitted in tried:
            rows = torch.cat((exact, rest.gather(1, fitted.places)), 1)
            bias = torch.cat((torch.zeros_like(exact, dtype=fitted.bias.dtype), fitted.bias), 1)
            yield _candidate(kv, rows, bias, torch.cat((_take(kv.values, exact), fitted.values), 1), share, whole)


def _weights(kv: LayerKV, exact: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Share of each reference query's attention that goes to the rows which are not kept exactly."""
    fixed = matching.attend(kv.fit_on, kv.keys[:, kv.always], kv.values[:, kv.always])
    kept = matching.attend(kv.fit_on, _take(kv.keys, exact), _take(kv.values, exact))
    rest = matching.attend(kv.fit_on, keys, values)
    return (rest.lse - matching.merge(matching.merge(fixed, kept), rest).lse).exp()
