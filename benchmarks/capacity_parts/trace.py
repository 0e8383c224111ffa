"""Questions with their times, documents and lengths: the same for a real run and for its simulation."""

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Asked:
    """A question: when, about which document, and how many tokens the answer has."""

    at: float
    document: int
    answer_tokens: int


def popularity(n: int, zipf: float) -> list[float]:
    """The probability that a question is about each of `n` documents."""
    weights = [rank**-zipf for rank in range(1, n + 1)]
    total = sum(weights)
    return [weight / total for weight in weights]


def poisson(
    rate: float, seconds: float, n_documents: int, zipf: float, tokens: tuple[int, int], seed: int
) -> Iterator[Asked]:
    """Open loop: arrivals at `rate` a second whatever becomes of them, answers of `tokens` (least, most), each length
    as likely as any other."""
    chance, edges = Random(seed), list(itertools.accumulate(popularity(n_documents, zipf)))
    at = chance.expovariate(rate)
    while at < seconds:
        document = min(bisect.bisect(edges, chance.random()), n_documents - 1)
        yield Asked(at, document, chance.randint(*tokens))
        at += chance.expovariate(rate)
