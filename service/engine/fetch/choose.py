"""Which tokens of a document to fetch for a question, from a figure for each of its spans."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cache_store.segments import Segments
from service.engine.fetch.coverage import Coverage
from service.engine.fetch.index import SPAN_TOKENS, Look
from service.engine.messages import SpanRef

NEIGHBOURS = 2
"""Spans on either side of a good one that come with it where nothing is known of sentences."""
REACH = 48
"""Tokens on either side of a good span that come with it at most, where its sentences are longer."""
LEAST_SHARE = 0.5
"""Of the best span's figure: what has less stays away, unless it adds enough. Passages that only look alike mislead a
model more than they help it: docs/recall.md has what each share finds, docs/long-documents.md what is then answered."""
LEAST_GAIN = 0.2
"""Of the best span's figure: what adds so much comes all the same; docs/two-places.md has questions that need it."""
_PATIENCE = 4
"""Spans that do not fit any more before the rest of the budget stays unused: shorter ones far down say nothing."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What there is to choose from one document, and the arguments of `choose_spans` of these names."""

    look: Look
    segments: Segments
    n_tokens: int
    resident: Sequence[tuple[int, int]]
    starts: npt.ArrayLike = ()


def choose_spans(
    look: Look,
    segments: Segments,
    n_tokens: int,
    *,
    resident: Sequence[tuple[int, int]],
    fetch_tokens: int,
    carried: Sequence[SpanRef] = (),
    starts: npt.ArrayLike = (),
    span_tokens: int = SPAN_TOKENS,
    neighbours: int = NEIGHBOURS,
    least_share: float = LEAST_SHARE,
    least_gain: float = LEAST_GAIN,
) -> list[SpanRef]:
    """Tokens to fetch, at most `fetch_tokens` of them: in order, apart from each other, none of them resident.

    `look`: a figure per span of `span_tokens`, 0 for those that are of no interest. The best spans come first, each
    with the sentences it lies in: `starts` are the tokens that begin one, in order; without any, `neighbours` spans on
    either side come with it, within its segment. A span comes when it has at least `least_share` of the best one's
    figure, or adds at least `least_gain` of it to what came before (`Coverage`). Then `carried` ones (those of the last
    turn) follow while there is room. Of what is partly in `resident`, ranges ``[first, last)``, only the rest is taken.
    What does not fit whole is left out; only the best span comes without its sentences rather than not at all. Touching
    tokens of one segment become one span.
    """
    one = Choices(look, segments, n_tokens, resident, starts)
    return choose_among(
        [one],
        fetch_tokens=fetch_tokens,
        carried=carried,
        span_tokens=span_tokens,
        neighbours=neighbours,
        least_share=least_share,
        least_gain=least_gain,
    )


def choose_among(
    documents: Sequence[Choices],
    *,
    fetch_tokens: int,
    carried: Sequence[SpanRef] = (),
    span_tokens: int = SPAN_TOKENS,
    neighbours: int = NEIGHBOURS,
    least_share: float = LEAST_SHARE,
    least_gain: float = LEAST_GAIN,
) -> list[SpanRef]:
    """`choose_spans` over several documents with one budget: the best spans of all, in the order of the documents.
    Their scores are of one measure."""
    picks = _Picks(fetch_tokens, [list(one.resident) for one in documents])
    around = [
        _Around(one.segments, one.n_tokens, np.asarray(one.starts, np.int64), span_tokens, neighbours)
        for one in documents
    ]
    coverage = Coverage([one.look for one in documents])
    best, skipped = max((float(one.look.figures.max()) for one in documents if len(one.look.figures)), default=0.0), 0
    for score, number, place in _best_first(documents):
        if (
            score <= 0
            or score < min(least_share, least_gain) * best
            or picks.left < span_tokens
            or skipped == _PATIENCE
        ):
            break
        if score < least_share * best and coverage.gain(number, place) < least_gain * best:
            continue
        taken = around[number].with_sentences(place)
        if not picks.add(number, *taken):
            skipped += 1
            taken = around[number].alone(place)
            if any(picks.ranges) or not picks.add(number, *taken):
                continue
        coverage.take(number, *taken)
    for ref in sorted(carried):
        picks.add(ref.document, ref.first, min(ref.first + ref.n_tokens, documents[ref.document].n_tokens))
    return [
        SpanRef(first, n_tokens, number)
        for number, (one, ranges) in enumerate(zip(documents, picks.ranges, strict=True))
        for first, n_tokens in _merged(ranges, one.segments.ranges(one.n_tokens))
    ]


def best_passage(
    documents: Sequence[Choices], span_tokens: int = SPAN_TOKENS, neighbours: int = NEIGHBOURS
) -> tuple[int, int, int]:
    """The document, and the tokens ``[first, last)`` in it, of the best span with the sentences it lies in."""
    _, number, place = next(_best_first(documents))
    one = documents[number]
    around = _Around(one.segments, one.n_tokens, np.asarray(one.starts, np.int64), span_tokens, neighbours)
    return number, *around.with_sentences(place)


def _best_first(documents: Sequence[Choices]) -> Iterator[tuple[float, int, int]]:
    """Score, document and place of every span."""
    scores = torch.cat([one.look.figures for one in documents])
    numbers = np.repeat(np.arange(len(documents)), [len(one.look.figures) for one in documents])
    places = np.concatenate([np.arange(len(one.look.figures)) for one in documents])
    best = scores.sort(descending=True, stable=True)
    for i, score in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        yield score, int(numbers[i]), int(places[i])


class _Picks:
    """Ranges of tokens by document, no token twice and none of `taken`, of at most `left` more tokens."""

    def __init__(self, left: int, taken: list[list[tuple[int, int]]]) -> None:
        self.left = left
        self._taken = taken
        self.ranges: list[list[tuple[int, int]]] = [[] for _ in taken]

    def add(self, document: int, first: int, last: int) -> bool:
        """Take what of ``[first, last)`` is not taken yet, all of it or nothing; whether it fitted."""
        new = _without(first, last, self._taken[document])
        size = sum(end - begin for begin, end in new)
        if size > self.left:
            return False
        self.ranges[document] += new
        self._taken[document] += new
        self.left -= size
        return True


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


@dataclass(frozen=True, slots=True)
class _Around:
    """What comes with a span."""

    segments: Segments
    n_tokens: int
    starts: npt.NDArray[np.int64]
    span_tokens: int
    neighbours: int

    def alone(self, place: int) -> tuple[int, int]:
        """The tokens ``[first, last)`` of a span."""
        first = place * self.span_tokens
        return first, min(first + self.span_tokens, self.n_tokens)

    def with_sentences(self, place: int) -> tuple[int, int]:
        """Those, and what is around them. A sentence goes on in the next segment, neighbours do not."""
        first, last = self.alone(place)
        if not len(self.starts):
            begin, end = self._segment(first)
            reach = self.neighbours * self.span_tokens
            return max(first - reach, begin), min(last + reach, end)
        before = int(self.starts.searchsorted(first, "right")) - 1
        behind = int(self.starts.searchsorted(last))
        low = self.starts[before] if before >= 0 else 0
        high = self.starts[behind] if behind < len(self.starts) else self.n_tokens
        return max(int(low), first - REACH), min(int(high), last + REACH)

    def _segment(self, token: int) -> tuple[int, int]:
        size = self.segments.segment_tokens or self.n_tokens
        begin = token // size * size
        return begin, min(begin + size, self.n_tokens)


def _merged(ranges: Sequence[tuple[int, int]], segments: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """First token and length of each: in order, touching ones joined, none in two segments."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        for begin, end in segments:
            low, high = max(first, begin), min(last, end)
            if low < high:
                joins = merged and merged[-1][1] == low and low != begin
                merged.append((merged.pop()[0] if joins else low, high))
    return [(first, last - first) for first, last in merged]
