"""What the model looked at while it wrote an answer, sentence by sentence, on the pages of an index."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.core.citations.index import PageIndex

MIN_MASS = 0.15
"""Of everything a sentence's tokens look at: a page with so much of it supports the sentence. docs/citations.md has
what answers give to the page with the fact, and sentences without one to any page."""
_PAGE_SHARE = 0.3
_PLACE_SHARE = 0.15
"""What attention adds to the ranking of passages at most (not to the score): to all of a page, and to the place on it
that was looked at most."""


@dataclass(frozen=True, slots=True)
class PageLook:
    """Attention that fell on a page of an index, by the page's number there, between two places on it as shares of its
    length."""

    page: int
    first: float
    last: float
    mass: float


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Characters of an answer through `end`, from the piece before. `mass`: of its attention on all pages together."""

    end: int
    mass: float
    looks: Sequence[PageLook]


class SentenceAttention:
    """What one sentence looked at: the mean over its characters."""

    def __init__(self, pieces: Sequence[tuple[float, AnswerPiece]]) -> None:
        """`pieces` with the share of the sentence that each makes up."""
        self._looks = [(share * look.mass, look) for share, piece in pieces for look in piece.looks]
        self._mass = sum(share * piece.mass for share, piece in pieces)
        self._pages: dict[int, float] = {}
        for mass, look in self._looks:
            self._pages[look.page] = self._pages.get(look.page, 0.0) + mass

    def mass(self, page: int) -> float:
        """Of everything that was looked at, what fell on a page."""
        return self._pages.get(page, 0.0)

    def share(self, page: int) -> float:
        """Of the attention on pages, that on one of them, in [0, 1]."""
        mass = self._pages.get(page, 0.0)
        return min(mass / max(self._mass, mass), 1.0) if mass else 0.0

    def supports(self, page: int) -> bool:
        """Whether so much fell on the page that the sentence rests on it."""
        return self._pages.get(page, 0.0) >= MIN_MASS

    def hint(self, index: PageIndex) -> NDArray[np.float64]:
        """What it adds to the rank of each sentence of the index; little where little was looked at pages."""
        places = np.zeros(index.n_sentences)
        for mass, look in self._looks:
            numbers, shares = index.sentences_within(look.page, look.first, look.last)
            places[numbers] += mass * shares
        best = places.max(initial=0.0)
        hint = _PLACE_SHARE * places / best if best else places
        for page, mass in self._pages.items():
            weight = min(mass / MIN_MASS, 1.0)
            first, last = index.sentences_of(page)
            hint[first:last] = weight * (hint[first:last] + _PAGE_SHARE * self.share(page))
        return hint


class AnswerAttention:
    """What an answer looked at, in pieces in its order."""

    def __init__(self, pieces: Sequence[AnswerPiece]) -> None:
        self._pieces = pieces

    def of(self, start: int, end: int) -> SentenceAttention:
        """Of the answer's characters `start` to `end`."""
        found: list[tuple[float, AnswerPiece]] = []
        begin = 0
        for piece in self._pieces:
            overlap = min(piece.end, end) - max(begin, start)
            if overlap > 0:
                found.append((overlap / (end - start), piece))
            begin = piece.end
        return SentenceAttention(found)
