"""Closed forms of queues: places that are taken, questions that wait."""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

Vector = np.ndarray


def erlang_b(places: int, load: float) -> float:
    """The probability that all of `places` are taken when nobody waits. `load`: arrivals in a service time."""
    if load <= 0:
        return 0.0
    inverse = 1.0
    for n in range(1, places + 1):
        inverse = 1.0 + inverse * n / load
        if inverse > 1e300:
            return 0.0
    return 1.0 / inverse


def erlang_c(places: int, load: float) -> float:
    """The probability that a question waits when all wait in one line; 1 when there is more than can be served."""
    if load >= places:
        return 1.0
    blocked = erlang_b(places, load)
    return blocked / (1 - load / places * (1 - blocked))


@dataclass(frozen=True, slots=True)
class Line:
    """`waits`: the share of those that are served for which no place was free; `wait_s`: how long these waited in the
    mean, as a sum of `shape` exponential times; `refused`: a share of all."""

    waits: float
    wait_s: float
    refused: float = 0.0
    shape: int = 1

    def longer(self, seconds: Vector) -> Vector:
        """The probability that one who waits does so for longer."""
        x = np.maximum(seconds, 0.0) * self.shape / max(self.wait_s, 1e-12)
        term, total = np.ones_like(x), np.ones_like(x)
        for n in range(1, self.shape):
            term = term * x / n
            total = total + term
        return np.where(seconds < 0, 1.0, np.exp(-np.minimum(x, 700.0)) * total)


def line(places: int, rate: float, service_s: float, cv: float, limit: int) -> Line:
    """A line before `places`, of which with those that are served `limit` may be there. `cv`: standard deviation of a
    service over its mean, by which waiting grows as in an M/G/1 queue."""
    load = rate * service_s
    if limit > 50 * places or limit - places > 20_000:
        if load >= places:
            return Line(1.0, math.inf)
        return Line(erlang_c(places, load), service_s / (places - load) * (1 + cv * cv) / 2)
    return _bounded(places, load, service_s, cv, limit)


def _bounded(places: int, load: float, service_s: float, cv: float, limit: int) -> Line:
    """M/M/c/K by its states, weights as logarithms."""
    chance = _chances(load, places, limit)
    refused, waiting = float(chance[limit]), chance[places:limit]
    waits = float(waiting.sum())
    if not waits:
        return Line(0.0, 0.0, refused)
    ahead = np.arange(len(waiting)) + 1.0
    mean = float((waiting * ahead).sum()) / waits
    spread = float((waiting * ahead**2).sum()) / waits - mean**2
    varied = 1.0 if load >= places else (1 + cv * cv) / 2
    shape = max(round(mean**2 / (mean * cv * cv + spread)), 1)
    return Line(waits / max(1 - refused, 1e-12), mean * service_s / places * varied, refused, min(shape, 60))


def _chances(load: float, places: int, most: int) -> Vector:
    """Of 0 to `most` being there, in an M/M/c/K queue."""
    n = np.arange(1, most + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(max(load, 1e-12)) - np.log(np.minimum(n, places)))])
    chance = np.exp(logs - logs.max())
    return chance / chance.sum()


@dataclass(frozen=True, slots=True)
class Worker:
    """One of many, where a question goes elsewhere when so many wait that the worker is crowded. `full`: the
    probability that no place is free; `crowded`: that so many wait. Of those that it takes, `waits` wait, for `wait`
    services."""

    full: Vector
    crowded: Vector
    waits: Vector
    wait: Vector


def worker(places: int, line_places: int, taken: Vector | float) -> Worker:
    """By how many of its places are taken in the mean; `line_places` may wait. Erlang's formulas, at the load of which
    so many are carried."""
    table = _carried(places, line_places)
    return Worker(*(np.interp(np.asarray(taken), table[0], row) for row in table[1:]))


@cache
def _carried(places: int, line_places: int) -> Vector:
    offered = np.concatenate([[1e-9], np.geomspace(places * 1e-3, places * 1e4, 300)])
    return np.stack([_states(places, line_places, each) for each in offered], axis=1)


def _states(places: int, line_places: int, load: float) -> Vector:
    """Carried load, and what a `Worker` has, in an M/M/c queue with so many places to wait."""
    n, chance = np.arange(places + line_places + 1), _chances(load, places, places + line_places)
    crowded, in_line = chance[-1], chance[places:-1]
    waits = in_line.sum()
    ahead = (in_line * (n[places:-1] - places + 1)).sum() / places / max(waits, 1e-300)
    return np.array([load * (1 - crowded), waits + crowded, crowded, waits / max(1 - crowded, 1e-300), ahead])
