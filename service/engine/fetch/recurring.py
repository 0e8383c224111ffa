"""What a passage names that stands elsewhere too: the only reason to look for a second place."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from service.engine.fetch.coverage import both
from service.engine.fetch.index import Look

MOST = 7
"""Other places of a pair of tokens at most. What stands everywhere leads nowhere."""

SECOND_WEIGHT = 0.5
"""Of the best that is found for them, against the best that is found for the question. docs/two-places.md has what
that finds."""

Tokens = npt.NDArray[np.integer]


def recurring(documents: Sequence[Tokens], number: int, first: int, last: int, known: Sequence[int]) -> list[int]:
    """Places in the passage ``[first, last)`` of document `number` whose token, with the one before it, stands at
    1 to MOST other places of the documents, and not in `known`, the question.

    Names, numbers and terms are several tokens long, so a pair tells them from words that merely come again.
    """
    passage = _pairs(documents[number][max(first - 1, 0) : last])
    if not len(passage):
        return []
    wanted = np.unique(passage)
    counts = sum((_count(_pairs(tokens), wanted) for tokens in documents), np.zeros(len(wanted), np.int64))
    elsewhere = counts - _count(passage, wanted)
    kept = wanted[(elsewhere > 0) & (elsewhere <= MOST)]
    told = np.isin(passage, kept) & ~np.isin(passage, _pairs(np.asarray(known, np.int64)))
    return [last - len(passage) + int(place) for place in np.flatnonzero(told)]


def join(first: Sequence[Look], second: Sequence[Look], weight: float = SECOND_WEIGHT) -> list[Look]:
    """For each document one look of two: the best of `second` counts `weight` times the best of `first`."""
    best, most = (max(float(one.figures.max()) for one in of) for of in (first, second))
    scale = weight * best / most if most > 0 else 0.0
    return [both(one, other, scale) for one, other in zip(first, second, strict=True)]


def _pairs(tokens: Tokens) -> npt.NDArray[np.int64]:
    """Each token with the one before it, as one number."""
    ids = np.asarray(tokens, np.int64)
    return (ids[:-1] << 32) | ids[1:]


def _count(pairs: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How often each of `wanted`, sorted, is among the pairs."""
    places = np.minimum(wanted.searchsorted(pairs), len(wanted) - 1)
    return np.bincount(places[wanted[places] == pairs], minlength=len(wanted))
