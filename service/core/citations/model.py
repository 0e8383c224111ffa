"""What is said about an answer: where its sentences come from, and which have no place in the document."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Citation:
    """Where a sentence of an answer comes from.

    `quote` is verbatim text of the page, its characters `page_start` to `page_end`; the sentence is the answer's
    characters `answer_start` to `answer_end`: code points, from 0, the end left out. `score` in [0, 1]. `attention`:
    the share in [0, 1] of the sentence's attention to the documents that fell on the page; None where it was not
    measured. `label` is the page's own name, where it has one.
    """

    document_id: str
    page: int
    quote: str
    score: float
    answer_start: int
    answer_end: int
    page_start: int
    page_end: int
    attention: float | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Range:
    """Code points of an answer, the end left out."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Cited:
    """Citations of an answer in its order, and its sentences that claim something which was found nowhere."""

    citations: list[Citation] = field(default_factory=list)
    unsupported: list[Range] = field(default_factory=list)
