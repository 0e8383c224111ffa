"""How often what a question needs is among the tokens that are fetched for it.

    python benchmarks/recall.py [--write] [--documents 12] [--device cpu]

Reads documents of public text with planted facts in segments, asks for the facts over the first 16 and the last 256
tokens alone, and looks whether the whole sentence with the answer is in the chosen spans. With `--write` the tables go
to docs/recall.md. The model is computed in FP32, on a CPU about a minute per document and length of segments when the
machine has nothing else to do; what was computed is kept in `--cache`.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from recall_cases import KV_TYPE, N_TOKENS, SINKS, WINDOW, Case, Question, Reader, prompts
from recall_page import Table, page
from recall_texts import WORDINGS
from torch import Tensor

from cache_store.segments import Segments
from service.cli.config import read_settings
from service.engine.fetch.choose import NEIGHBOURS, choose_spans
from service.engine.fetch.index import SPAN_TOKENS, KeyIndex
from service.engine.index_heads import read_index_heads

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recall.md"
BUDGETS = (64, 96, 128, 192, 256, 384, 512)
SEGMENT = 2048
SEGMENTS = (1024, 2048, 3072)

Combine = Callable[[Tensor], Tensor]
"""From masses ``[n_heads, heads per KV head, rows, n_spans]`` to a figure per span."""


@dataclass(frozen=True)
class Way:
    """How spans are scored and chosen."""

    budget: int = 256
    span_tokens: int = SPAN_TOKENS
    neighbours: int = NEIGHBOURS
    n_heads: int = 99
    own_rows: bool = True
    combine: Combine = lambda masses: masses.mean((0, 1, 2))


@dataclass(frozen=True)
class Shelf:
    """One or several documents as one: their segments one after the other. `firsts` are the tokens where they begin."""

    index: KeyIndex
    segments: Segments
    firsts: list[int]

    @property
    def resident(self) -> list[tuple[int, int]]:
        """Only the first document's sinks and the last one's window would be resident; the others' are left out too, so
        that no question finds what it saw."""
        ends = [((first, first + SINKS), (first + N_TOKENS - WINDOW, first + N_TOKENS)) for first in self.firsts]
        return [part for both in ends for part in both]


def shelf(reader: Reader, cases: Sequence[Case], segment_tokens: int) -> Shelf:
    firsts = [N_TOKENS * number for number in range(len(cases))]
    index = KeyIndex(reader.layout, N_TOKENS * len(cases), reader.heads)
    for first, case in zip(firsts, cases, strict=True):
        for layer, records in case.records.items():
            index.add(layer, first, memoryview(records), N_TOKENS)
    return Shelf(index, Segments(segment_tokens, SINKS), firsts)


class Scored:
    """Questions on a shelf; masses are computed once per question and size of span."""

    def __init__(self, on: Shelf, asked: Iterable[tuple[int, Question]]) -> None:
        self.on = on
        self.asked = list(asked)
        self._masses: dict[tuple[int, int], Tensor] = {}

    def found(self, way: Way) -> list[bool]:
        """For each question: whether the whole sentence is fetched."""
        return [self._found(number, way) for number in range(len(self.asked))]

    def share(self, way: Way, wording: str = "") -> float:
        found = self.found(way)
        kept = [ok for ok, (_, question) in zip(found, self.asked, strict=True) if question.wording.startswith(wording)]
        return sum(kept) / len(kept)

    def _found(self, number: int, way: Way) -> bool:
        document, question = self.asked[number]
        masses = self._of(number, way.span_tokens)[: way.n_heads]
        if way.own_rows:
            masses = masses[:, :, slice(*question.rows)]
        spans = choose_spans(
            way.combine(masses),
            self.on.segments,
            self.on.index.n_tokens,
            resident=self.on.resident,
            fetch_tokens=way.budget,
            span_tokens=way.span_tokens,
            neighbours=way.neighbours,
        )
        first, last = (self.on.firsts[document] + token for token in question.fact)
        return any(span.first <= first and last <= span.first + span.n_tokens for span in spans)

    def _of(self, number: int, span_tokens: int) -> Tensor:
        key = number, span_tokens
        if key not in self._masses:
            queries = self.asked[number][1].queries
            self._masses[key] = self.on.index.masses(queries, span_tokens, self.on.resident)
        return self._masses[key]


def alone(reader: Reader, cases: Sequence[Case], segment_tokens: int) -> list[Scored]:
    """Each document by itself."""
    return [Scored(shelf(reader, [case], segment_tokens), [(0, q) for q in case.questions]) for case in cases]


def together(reader: Reader, cases: Sequence[Case], segment_tokens: int) -> Scored:
    """All documents as one: every question has all facts and all texts against it."""
    asked = [(number, question) for number, case in enumerate(cases) for question in case.questions]
    return Scored(shelf(reader, cases, segment_tokens), asked)


def share(parts: Sequence[Scored], way: Way, wording: str = "") -> float:
    """Of all questions on several shelves."""
    return sum(part.share(way, wording) for part in parts) / len(parts)


def tables(reader: Reader, read: Callable[[int], list[Case]]) -> list[Table]:
    cases = read(SEGMENT)
    own, one = alone(reader, cases, SEGMENT), together(reader, cases, SEGMENT)
    both = (own, [one])
    found = [
        Table.of("budget", [str(budget) for budget in BUDGETS],
                 [[share(parts, Way(budget=budget)) for parts in both] for budget in BUDGETS]),
        Table.of("wording", [f"{w.name}: {w.what}" for w in WORDINGS],
                 [[share(parts, Way(), w.name) for parts in both] for w in WORDINGS]),
        Table.of("span", [f"{size} tokens, {n} on either side" for size, n in SIZES],
                 [[share(parts, Way(span_tokens=size, neighbours=n, budget=budget)) for parts in both for budget in (128, 256)]
                  for size, n in SIZES]),
        Table.of("score", list(WAYS), [[share(parts, replace(way, budget=b)) for parts in both for b in (128, 256)]
                                       for way in WAYS.values()]),
    ]  # fmt: skip
    return [*found, _by_segment(reader, read)]


SIZES = ((16, 1), (16, 2), (16, 3), (32, 0), (32, 1), (32, 2), (64, 0), (64, 1))
WAYS = {
    "mean over the question's rows, all index heads": Way(),
    "the same, the first index head alone": Way(n_heads=1),
    "mean over all rows of the prompt": Way(own_rows=False),
    "largest of the question's rows": Way(combine=lambda masses: masses.amax(2).mean((0, 1))),
    "mean of the three largest rows": Way(combine=lambda m: m.topk(min(3, m.shape[2]), dim=2).values.mean((0, 1, 2))),
    "mean of square roots": Way(combine=lambda masses: masses.sqrt().mean((0, 1, 2))),
    "largest of the heads": Way(combine=lambda masses: masses.mean((1, 2)).amax(0)),
}


def _by_segment(reader: Reader, read: Callable[[int], list[Case]]) -> Table:
    rows = []
    for segment in SEGMENTS:
        cases = read(segment)
        parts = alone(reader, cases, segment), [together(reader, cases, segment)]
        rows.append([share(scored, Way(budget=budget)) for scored in parts for budget in (128, 256)])
    return Table.of("segment", [f"{segment:,}" for segment in SEGMENTS], rows)
