"""The fitted remainder: a few keys with a bias each and refitted values that stand for many rows of KV.

Attention over two sets of rows depends on one of them only through its mass ``sum exp(q k)`` and its output, for each
query. A remainder is fitted so that both are nearly right for many reference queries, and is then right beside
whatever else is attended to (Attention Matching, Zweiger et al., 2026, arXiv 2602.16284). Ours shrinks the refitted
values towards the rows' own, because plain least squares breaks down on text that repeats itself.

Queries are scaled: a product with a key is the score. Leading dimension: the heads of one layer. Pure tensor math.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_BIAS = 3.0
_STEPS = 120


@dataclass(frozen=True, slots=True)
class Remainder:
    """`places` of the keys among the rows, int64 ``[heads, t]``; `bias` ``[heads, t]``; `values` ``[heads, t, d]``."""

    places: Tensor
    bias: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Attention over one set of rows: `out` ``[heads, rows, d]`` and `lse`, the log of its mass, ``[heads, rows]``."""

    out: Tensor
    lse: Tensor


def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> Part:
    """Attention of ``[heads, rows, d]`` over ``[heads, n, d]``, `bias` ``[heads, n]`` added to the scores. Over no rows
    the output is 0 and the log of the mass minus infinity."""
    scores = queries @ keys.transpose(1, 2)
    if bias is not None:
        scores = scores + bias[:, None]
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0)
    return Part(weights @ values, lse)


def merge(a: Part, b: Part) -> Part:
    """Attention over both sets of rows from that over each."""
    lse = torch.logaddexp(a.lse, b.lse)
    wa, wb = ((part.lse - lse).exp().nan_to_num(0)[..., None] for part in (a, b))
    return Part(wa * a.out + wb * b.out, lse)


def fit(
    keys: Tensor,
    values: Tensor,
    queries: Tensor,
    weights: Tensor,
    n_slots: int,
    *,
    ridges: Sequence[float],
    biased: bool = True,
) -> list[Remainder]:
    """Fit `n_slots` slots for rows `keys`, `values` ``[heads, r, d]`` on `queries` ``[heads, n, d]``, once per ridge.

    `weights` ``[heads, n]``: how much the rows matter to each query (their share of its whole attention). `ridges`:
    pulls towards the rows' own values, relative to the mean square of the weights; infinity leaves values as they are.
    Without `biased` every bias is 0. Raises ValueError when there are fewer rows than slots.
    """
    if not 0 < n_slots <= keys.shape[1]:
        raise ValueError(f"{n_slots} slots for {keys.shape[1]} rows")
    scores = queries @ keys.transpose(1, 2)
    shares = scores.softmax(-1)
    places = _most_looked_at(shares, weights, n_slots)
    bias = _bias(_columns(shares, places), weights) if biased else keys.new_zeros(places.shape)
    own = values.gather(1, places[..., None].expand(-1, -1, values.shape[-1]))
    slot_shares = (_columns(scores, places) + bias[:, None]).softmax(-1)
    wanted = shares @ values
    refitted = (own + _correction(slot_shares, wanted, own, weights, r) if r < math.inf else own for r in ridges)
    return [Remainder(places, bias, v) for v in refitted]


def _columns(x: Tensor, places: Tensor) -> Tensor:
    return x.gather(2, places[:, None].expand(-1, x.shape[1], -1))


def _most_looked_at(shares: Tensor, weights: Tensor, n_slots: int) -> Tensor:
    """The rows with the largest weighted root mean square of attention, ascending."""
    strength = (weights[..., None] * shares.square()).mean(1)
    order = strength.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :n_slots].sort(-1).values


def _bias(shares: Tensor, weights: Tensor) -> Tensor:
    """Logs of the non-negative factors with which the slots' masses sum up to the whole, 1 for every query: least
    squares by accelerated projected gradient (Beck and Teboulle, 2009). No entry is negative, so the largest sum of a
    row bounds the largest eigenvalue."""
    weighted = shares.transpose(1, 2) * weights[:, None]
    gram, target = weighted @ shares, weighted.sum(-1)
    step = 1 / gram.sum(-1).amax(-1).clamp_min(1e-30)[:, None]
    low, high = torch.exp(torch.tensor((-LARGEST_BIAS, LARGEST_BIAS))).tolist()
    factors = (target.sum(-1, keepdim=True) / gram.sum((1, 2))[:, None]).clamp(low, high).expand_as(target)
    ahead, pace = factors, 1.0
    for _ in range(_STEPS):
        gradient = (gram @ ahead[..., None])[..., 0] - target
        new = (ahead - step * gradient).clamp(low, high)
        next_pace = (1 + (1 + 4 * pace**2) ** 0.5) / 2
        ahead = new + (pace - 1) / next_pace * (new - factors)
        factors, pace = new, next_pace
    return factors.log()


def _correction(shares: Tensor, wanted: Tensor, own: Tensor, weights: Tensor, ridge: float) -> Tensor:
    """What to add to the slots' own values, by least squares with a ridge: ``[heads, t, d]``.

    In FP64: slots that are looked at together make the normal equations too near to singular for FP32.
    """
    missing = (wanted - shares @ own).double()
    shares = shares.double()
    weighted = shares.transpose(1, 2) * weights[:, None].double()
    gram = weighted @ shares
    pull = ridge * gram.diagonal(dim1=1, dim2=2).mean(-1).clamp_min(1e-30)
    gram.diagonal(dim1=1, dim2=2).add_(pull[:, None])
    return torch.cholesky_solve(weighted @ missing, torch.linalg.cholesky(gram)).to(own.dtype)
