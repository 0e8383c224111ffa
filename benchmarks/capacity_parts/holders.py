"""How many workers have a document in memory, and how often a question finds it: Che's approximation, with copies.

A document that is asked about `rate` times a second stays in the memory of a worker for the *characteristic time* T
after its last question there (Che, Tung and Wang, 2002: T is about the same for all documents of an LRU memory). When
all workers that have it are crowded and another one has a place, that one gets a copy. The number of its holders is
then a birth-and-death process: with h holders, a question begins another copy with the probability that it spills, and
holders let go at ``rate / (exp(rate * T / h) - 1)`` together. Without copies, its stationary distribution is Che's:
resident with probability ``1 - exp(-rate * T)``. T is where all copies together fill the memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Vector = np.ndarray
MOST_HOLDERS = 48


@dataclass(frozen=True, slots=True)
class Popularity:
    """Documents in groups that are alike: `count` of them, each asked about `share` of all questions."""

    count: Vector
    share: Vector

    @classmethod
    def zipf(cls, n: int, exponent: float, exact: int = 64) -> "Popularity":
        """The first `exact` ranks one by one, the rest in 100 groups of growing size."""
        edges = np.arange(1, min(n, exact) + 1, dtype=float)
        if n > exact:
            more = np.unique(np.geomspace(exact + 1, n + 1, 101).astype(np.int64)).astype(float)
            edges = np.concatenate([edges, more])
        else:
            edges = np.append(edges, n + 1)
        first, last = edges[:-1], edges[1:]
        weight = _sums(first, last, exponent)
        return cls(last - first, weight / weight.sum() / (last - first))


def _sums(first: Vector, last: Vector, exponent: float) -> Vector:
    """Sums of rank**-exponent from `first` to before `last`, by the integral where there are many."""
    single = first**-exponent
    low, high = first - 0.5, last - 0.5
    if abs(exponent - 1) < 1e-9:
        integral = np.log(high / low)
    else:
        integral = (high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent)
    return np.where(last - first == 1, single, integral)


@dataclass(frozen=True, slots=True)
class Held:
    """By group: `here`, the probability that a question finds its document in the memory of the worker it goes to;
    `away`, that it has no holder; `copied`, that it has one and goes to another worker. `copies`: holders in the
    mean. `lasting_s`: T."""

    here: Vector
    away: Vector
    copied: Vector
    copies: Vector
    lasting_s: float


def held(rates: Vector, counts: Vector, n_workers: int, room: float, spill: Callable[[int], Vector | float]) -> Held:
    """`rates`: questions a second about a document of each group; `room`: documents that all memories together hold.
    ``spill(h)``: the probability, by group, that a question goes to another worker than the h that have its document.
    """
    h_most = min(n_workers, MOST_HOLDERS)
    spills = np.ones((h_most + 1, len(rates)))
    for h in range(1, h_most + 1):
        spills[h] = spill(h) if h < n_workers else 0.0
    if counts.sum() * n_workers <= room:
        return _at(rates, spills, 1e12)
    low, high = 1e-6, 1e12
    for _ in range(50):
        middle = (low * high) ** 0.5
        if (counts * _at(rates, spills, middle).copies).sum() < room:
            low = middle
        else:
            high = middle
    return _at(rates, spills, low)


def _at(rates: Vector, spill: Vector, lasting_s: float) -> Held:
    """When an unused document stays so long."""
    n = spill.shape[0]
    logs = np.zeros_like(spill)
    for h in range(1, n):
        # births at h - 1 over deaths at h; the rates of both are the document's, which cancels
        deaths = np.expm1(np.minimum(rates * lasting_s / h, 600.0))
        logs[h] = logs[h - 1] + np.log(np.maximum(spill[h - 1], 1e-300)) + np.log(np.maximum(deaths, 1e-300))
    weights = np.exp(logs - logs.max(axis=0))
    chance = weights / weights.sum(axis=0)
    holders = np.arange(n)[:, None]
    copied = (chance[1:] * spill[1:]).sum(axis=0)
    return Held(1 - chance[0] - copied, chance[0], copied, (chance * holders).sum(axis=0), lasting_s)
