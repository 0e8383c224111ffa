"""Which spans of a document to fetch for a question, from a figure for each of them."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from cache_store.segments import Segments
from service.engine.fetch.index import SPAN_TOKENS
from service.engine.messages import SpanRef

NEIGHBOURS = 1
"""Spans on either side of a good one that come with it: a sentence rarely ends where a span does."""


def choose_spans(
    scores: Tensor,
    segments: Segments,
    n_tokens: int,
    *,
    resident: Sequence[tuple[int, int]],
    fetch_tokens: int,
    carried: Sequence[SpanRef] = (),
    span_tokens: int = SPAN_TOKENS,
    neighbours: int = NEIGHBOURS,
) -> list[SpanRef]:
    """Tokens to fetch, at most `fetch_tokens` of them: in order, apart from each other, none of them resident.

    `scores`: one per span of `span_tokens`, the larger the better. The best spans come first, each with its neighbours
    in the same segment, then `carried` ones (those of the last turn) while there is room. Of a span that is partly
    in `resident`, ranges ``[first, last)``, only the rest is taken; what does not fit whole is left out. Touching
    spans of one segment become one.
    """
    picks = _Picks(resident, fetch_tokens)
    for span in _by_score(scores, segments, n_tokens, span_tokens, neighbours):
        if picks.full:
            break
        picks.add(*span)
    for ref in sorted(carried):
        picks.add(ref.first, min(ref.first + ref.n_tokens, n_tokens))
    return _merged(picks.ranges, [last for _, last in segments.ranges(n_tokens)])


class _Picks:
    """Ranges of tokens, no token twice, within a budget."""

    def __init__(self, taken: Sequence[tuple[int, int]], budget: int) -> None:
        self.ranges: list[tuple[int, int]] = []
        self._taken = list(taken)
        self._left = budget

    @property
    def full(self) -> bool:
        return self._left <= 0

    def add(self, first: int, last: int) -> None:
        """Take what of ``[first, last)`` is not taken yet, all of it or nothing."""
        new = _without(first, last, self._taken)
        size = sum(end - begin for begin, end in new)
        if size <= self._left:
            self.ranges += new
            self._taken += new
            self._left -= size


def _without(first: int, last: int, taken: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    parts = [(first, last)]
    for begin, end in taken:
        parts = [
            part
            for low, high in parts
            for part in ((low, min(high, begin)), (max(low, end), high))
            if part[0] < part[1]
        ]
    return parts


def _by_score(
    scores: Tensor, segments: Segments, n_tokens: int, span_tokens: int, neighbours: int
) -> Iterator[tuple[int, int]]:
    """Spans ``[first, last)``, the best one first, each followed by its neighbours, the nearest first."""
    bounds = segments.ranges(n_tokens)
    size = segments.segment_tokens or n_tokens
    for best in scores.argsort(descending=True, stable=True).tolist():
        begin, end = bounds[best * span_tokens // size]
        for away in sorted(range(-neighbours, neighbours + 1), key=abs):
            first = (best + away) * span_tokens
            if begin <= first < end:
                yield first, min(first + span_tokens, end)


def _merged(ranges: Sequence[tuple[int, int]], ends: Sequence[int]) -> list[SpanRef]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and merged[-1][1] == first and first not in ends:
            first = merged.pop()[0]
        merged.append((first, last))
    return [SpanRef(first, last - first) for first, last in merged]
