"""Aligning the sentences of an answer with the document's.

A sentence's score is the share of its units and of its pairs of neighbouring units (each weighted by how
rare it is in the document, as in the BM25 family of weights) that one passage of a page holds: 1.0 for a
verbatim quote.
"""

import math
import re
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from service.core.citations.index import PageIndex
from service.core.citations.text import units

MIN_SCORE = 0.5
_MIN_INFORMATION = 0.8
"""A sentence must carry this share of the weight of one word that stands once: "Yes." or "It is." points
nowhere."""
_PAIR_SHARE = 0.4
_QUESTION_SHARE = 0.25
"""What the question's words add to the ranking of passages (not to the score): they decide between equal
matches."""
_SECOND_PART = 0.15
"""A second passage must add this much, and neighbouring units at that, to be cited beside the first."""
_NEIGHBOUR_GAIN = 0.12
_REFUSAL = re.compile(
    r"\b(?:does|do|did|is|are|was|were|can|could)(?:n['’]?t|\s+not)\b.{0,40}\b(?:say|state|mention|specif|contain|"
    r"provide|includ|given|found|find|answer|disclos|available|know)"
    r"|\bno (?:information|mention|answer)\b|\bnot (?:in|part of) the (?:document|text|contract|page)"
    r"|\bcan(?:not|['’]t) (?:know|answer|find|tell)"
    r"|(?:没有|未|并未|无法|不)(?:提到|提及|说明|包含|找到|回答|知道|涉及|给出)",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Pattern:
    """What to look for: weights of unit ids and of pairs of them; `total` also counts what no page holds."""

    unit_weights: dict[int, float] = field(default_factory=dict)
    pair_weights: dict[tuple[int, int], float] = field(default_factory=dict)
    unit_total: float = 0.0
    pair_total: float = 0.0

    @classmethod
    def of(cls, text: str, index: PageIndex) -> "Pattern":
        pattern = cls()
        rarest = math.log1p(index.n_sentences)
        weights: dict[str, float] = {}
        previous: str | None = None
        pairs: set[tuple[str, str]] = set()
        for unit, _, _ in units(text):
            if unit not in weights:
                weights[unit] = pattern._add_unit(unit, index, rarest)
            if previous is not None and (previous, unit) not in pairs:
                pairs.add((previous, unit))
                pattern._add_pair(previous, unit, index, (weights[previous] + weights[unit]) / 2)
            previous = unit
        return pattern

    def _add_unit(self, unit: str, index: PageIndex, rarest: float) -> float:
        unit_id = index.unit_id(unit)
        if unit_id is None:  # a number the document lacks speaks against a passage, another word only a little
            weight = 1.5 * rarest if unit[0].isdigit() else 0.4 * rarest
        else:
            weight = math.log1p(index.n_sentences / len(index.sentences_with(unit_id)))
            self.unit_weights[unit_id] = weight
        self.unit_total += weight
        return weight

    def _add_pair(self, first: str, second: str, index: PageIndex, weight: float) -> None:
        self.pair_total += weight
        a, b = index.unit_id(first), index.unit_id(second)
        if a is not None and b is not None:
            self.pair_weights[a, b] = weight

    def without(self, matched: "Match") -> "Pattern":
        """The pattern less what a passage already holds, against the same totals."""
        return Pattern(
            {u: w for u, w in self.unit_weights.items() if u not in matched.units},
            {p: w for p, w in self.pair_weights.items() if p not in matched.pairs},
            self.unit_total,
            self.pair_total,
        )

    def scale(self, unit_sum: float, pair_sum: float) -> float:
        if not self.unit_total:
            return 0.0
        if not self.pair_total:
            return unit_sum / self.unit_total
        return (1 - _PAIR_SHARE) * unit_sum / self.unit_total + _PAIR_SHARE * pair_sum / self.pair_total

    def scores(self, index: PageIndex) -> NDArray[np.float64]:
        """The score of every sentence of the document."""
        unit_sums, pair_sums = np.zeros(index.n_sentences), np.zeros(index.n_sentences)
        for unit_id, weight in self.unit_weights.items():
            unit_sums[index.sentences_with(unit_id)] += weight
        for (first, second), weight in self.pair_weights.items():
            pair_sums[index.sentences_with_pair(first, second)] += weight
        unit_part = unit_sums / self.unit_total if self.unit_total else unit_sums
        if not self.pair_total:
            return unit_part
        return (1 - _PAIR_SHARE) * unit_part + _PAIR_SHARE * pair_sums / self.pair_total


@dataclass(frozen=True, slots=True)
class Match:
    """Sentences `first` through `last` of one page, what of the pattern they hold, and the score of that."""

    first: int
    last: int
    units: frozenset[int]
    pairs: frozenset[tuple[int, int]]
    score: float


def _match(pattern: Pattern, index: PageIndex, first: int, last: int) -> Match:
    held_units = frozenset(u for u in pattern.unit_weights if _between(index.sentences_with(u), first, last))
    held_pairs = frozenset(p for p in pattern.pair_weights if _between(index.sentences_with_pair(*p), first, last))
    score = pattern.scale(
        sum(pattern.unit_weights[u] for u in held_units), sum(pattern.pair_weights[p] for p in held_pairs)
    )
    return Match(first, last, held_units, held_pairs, score)


def _between(numbers: NDArray[np.int64], first: int, last: int) -> bool:
    at = int(np.searchsorted(numbers, first))
    return at < len(numbers) and int(numbers[at]) <= last


def _best(pattern: Pattern, index: PageIndex, hint: NDArray[np.float64]) -> Match | None:
    """The passage that ranks first: a sentence, grown by neighbours on its page as long as they add
    enough."""
    if not index.n_sentences or not (pattern.unit_weights or hint.any()):
        return None
    top = int(np.argmax(pattern.scores(index) + hint))
    match = _match(pattern, index, top, top)
    for _ in range(2):
        grown = [
            _match(pattern, index, first, last)
            for first, last in ((match.first - 1, match.last), (match.first, match.last + 1))
            if index.same_page(first, last)
        ]
        best = max(grown, key=lambda m: m.score, default=match)
        if best.score < match.score + _NEIGHBOUR_GAIN:
            break
        match = best
    return match


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of a sentence: passages that together hold it best, one, or two when it joins two places, and the
    score of all of them. `says_enough`: whether its words can point anywhere. `refuses`: it says that the document has
    no answer."""

    matches: list[Match]
    score: float
    says_enough: bool
    refuses: bool


def find(text: str, index: PageIndex, hint: NDArray[np.float64]) -> Finding:
    """`hint` adds to the rank of each sentence of the document, not to the score."""
    pattern, refuses = Pattern.of(text, index), bool(_REFUSAL.search(text))
    says_enough = pattern.unit_total > 0 and pattern.unit_total >= _MIN_INFORMATION * math.log1p(index.n_sentences)
    match = _best(pattern, index, hint)
    if match is None:
        return Finding([], 0.0, says_enough, refuses)
    found, score = [match], match.score
    if says_enough and score < 1 - _SECOND_PART:
        rest = _best(pattern.without(match), index, hint)
        if rest is not None and rest.pairs and rest.score >= _SECOND_PART:
            found.append(rest)
            score += rest.score
    score = min(score, 1.0)
    return Finding(found, score, says_enough, refuses and (score < 0.9 or not says_enough))


def hint_of(question: str, index: PageIndex) -> NDArray[np.float64]:
    """What the question's words add to each sentence of the document in the ranking."""
    return _QUESTION_SHARE * Pattern.of(question, index).scores(index)
