"""Runs every method over one document and gives the outcome of each question."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.fidelity_parts import fetch, keep
from benchmarks.fidelity_parts.documents import Document
from benchmarks.fidelity_parts.keep import Budget, Fit
from benchmarks.fidelity_parts.measure import Answers, Outcome, everything
from benchmarks.fidelity_parts.reader import Kept, Reader
from benchmarks.fidelity_parts.replays import Wording, replay
from benchmarks.fidelity_parts.selection import max_pool

RATIOS = (1, 2, 4, 8, 16, 32)
FETCH_TOKENS = 256
WITH_FETCH = (
    "sinks + window",
    "key norm",
    "selection: replay",
    "selection, per layer",
    "selection, per head",
    "hybrid",
    "hybrid, per layer",
)
FIT_RATIOS = (4, 8, 16)

REPLAYS = {
    "replay": Wording(),
    "replay, chunks of 500": Wording(chunk_tokens=500),
    "replay, chunks of 2,000": Wording(chunk_tokens=2000),
    "replay, no chat template": Wording("plain"),
    "replay, other words": Wording(request="Quote every sentence of the document, word for word."),
    "replay, times value norm": Wording(norm_aware=True),
    "questions about every sentence": Wording("questions"),
}
FITS = {
    "hybrid": Fit(all_ratios=True),
    "hybrid, per layer": Fit(layered=True, all_ratios=True),
    "hybrid, half exact": Fit(shares=(0.5,)),
    "hybrid, fitted on questions": Fit(replay="questions about every sentence"),
    "hybrid without bias": Fit(biased=False),
    "hybrid without ridge": Fit(ridges=(1e-6,)),
    "hybrid, own values": Fit(ridges=(float("inf"),)),
    "fitted remainder alone": Fit(shares=(0.0,)),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """A method's outcomes over one document: one per question. `rows`: mean rows per head that were kept, `fetched`:
    mean tokens that a question brought back, `found`: for each question whether its fact was among them (or None)."""

    method: str
    ratio: int
    rows: float
    outcomes: list[Outcome]
    fetched: float = 0.0
    found: list[bool | None] | None = None
    notes: dict[str, float] | None = None


class Trial:
    """One document, prefilled once, and what is needed for all methods."""

    def __init__(self, reader: Reader, document: Document, wordings: dict[str, Wording]) -> None:
        self.reader, self.document = reader, document
        self.kv = reader.prefill(document.ids)
        self.answers = Answers(reader, document.questions, self.kv)
        fitted_on = {how.replay for how in FITS.values()}
        self.looked = {
            name: replay(reader, document, self.kv, how, keep_queries=name in fitted_on)
            for name, how in wordings.items()
        }

    def references(self) -> Iterator[Measured]:
        """The full cache, and no document at all."""
        full = everything(self.kv)
        yield Measured("full", 1, self.kv.n_tokens, self.answers.outcomes(self.kv, full))
        empty = self.reader.prompt.document("").ids
        yield Measured("no document", 1, len(empty), self.answers.outcomes_of_texts([empty]))

    def at(self, ratio: int, fits: dict[str, Fit]) -> Iterator[Measured]:
        """Every method at one ratio, each without and with fetch."""
        budget = Budget.of(self.kv.n_tokens, ratio)
        for method, make in self._ways(budget, fits if ratio > 1 else {}):
            notes: dict[str, float] = {}
            kept = make(notes)
            yield self.measured(method, ratio, kept, notes=notes)
            if ratio > 1 and method in WITH_FETCH:
                yield self.with_fetch(f"{method} + fetch", ratio, kept, FETCH_TOKENS)
        if ratio > 1:
            yield from self._question_aware(budget, ratio)

    def _ways(self, budget: Budget, fits: dict[str, Fit]) -> Iterator[tuple[str, Callable[[dict[str, float]], Kept]]]:
        kv = self.kv
        yield "sinks + window", lambda _: keep.window(kv, budget)
        yield "key norm", lambda _: keep.uniform(kv, keep.key_norm_scores(kv), budget)
        for name, looked in self.looked.items():
            yield f"selection: {name}", lambda _, s=looked.scores: keep.uniform(kv, s, budget)
        first = next(iter(self.looked.values()))
        yield "selection, pooled", lambda _: keep.uniform(kv, max_pool(first.scores, 2), budget)
        yield "selection, per layer", lambda _: keep.layered(kv, first.scores, budget)
        yield "selection, per layer by its best head", lambda _: keep.layered(kv, first.scores, budget, best_head=True)
        yield "selection, per head", lambda _: keep.ragged(kv, first.scores, budget)
        pooled = max_pool(first.scores, 2)
        yield "selection, per layer, pooled", lambda _: keep.layered(kv, pooled, budget)
        for name, looked in list(self.looked.items())[1:]:
            yield f"selection, per layer: {name}", lambda _, s=looked.scores: keep.layered(kv, s, budget)
        if "questions about every sentence" in self.looked:
            both = torch.maximum(first.scores, self.looked["questions about every sentence"].scores)
            yield "selection: replay and questions", lambda _: keep.uniform(kv, both, budget)
            yield "selection, per layer: replay and questions", lambda _: keep.layered(kv, both, budget)
        for name, how in fits.items():
            if how.replay in self.looked and (how.all_ratios or budget.ratio in FIT_RATIOS):
                yield name, lambda notes, how=how: self._fitted(first.scores, budget, how, notes)

    def _fitted(self, scores: Tensor, budget: Budget, how: Fit, notes: dict[str, float]) -> Kept:
        found = keep.fitted(self.kv, scores, self.looked[how.replay], budget, how)
        exact = torch.tensor(found.exact)
        notes["heads not plain selection"] = float((exact < 1).float().mean())
        notes["mean exact share"] = float(exact.mean())
        notes["held-out error"] = float(torch.tensor(found.error).mean())
        notes["held-out error of selection"] = float(torch.tensor(found.selected).mean())
        return found.kept

    def measured(
        self,
        method: str,
        ratio: int,
        kept: Kept,
        fetched: Tensor | None = None,
        *,
        notes: dict[str, float] | None = None,
        twice: bool = False,
    ) -> Measured:
        """All questions over kept rows, with tokens ``[questions, n]`` fetched for each."""
        outcomes = self.answers.outcomes(self.kv, kept, fetched, twice)
        if fetched is None:
            return Measured(method, ratio, kept.mean_rows, outcomes, notes=notes)
        there = fetched | kept.always
        found = [
            bool(there[i, slice(*q.fact)].all()) if q.fact[1] else None for i, q in enumerate(self.answers.questions)
        ]
        n_fetched = float(fetched.sum(-1).float().mean())
        return Measured(method, ratio, kept.mean_rows, outcomes, n_fetched, found)

    def with_fetch(self, method: str, ratio: int, kept: Kept, n_tokens: int, twice: bool = False) -> Measured:
        """The same, with at most `n_tokens` tokens that the index heads find for each question."""
        layers = tuple(layer for layer, _ in fetch.INDEX_HEADS)
        queries = fetch.question_queries(self.reader, self.kv, kept, self.answers.questions, layers)
        fetched = fetch.chosen(fetch.index_scores(self.kv, queries), kept.always, n_tokens)
        return self.measured(method, ratio, kept, fetched, twice=twice)

    def _question_aware(self, budget: Budget, ratio: int) -> Iterator[Measured]:
        """What knows the question: spans or text for as many rows as the others keep."""
        bare = keep.only_always(self.kv, budget.always(self.kv.k.device))
        yield self.with_fetch("spans by index heads, equal rows", ratio, bare, budget.slots)
        layers = tuple(layer for layer in fetch.QUEST_LAYERS if layer < len(self.kv.k))
        queries = fetch.question_queries(self.reader, self.kv, bare, self.answers.questions, layers)
        fetched = fetch.chosen(fetch.quest_scores(self.kv, queries), bare.always, budget.slots, 0)
        yield self.measured("spans by Quest bounds, equal rows", ratio, bare, fetched)
        selected = keep.uniform(self.kv, next(iter(self.looked.values())).scores, budget)
        yield self.with_fetch("selection + fetch, fetched rows twice", ratio, selected, FETCH_TOKENS, twice=True)
        texts = [fetch.bm25_ids(self.reader, self.document, q, budget.rows) for q in self.answers.questions]
        yield Measured("text by BM25, read afresh", ratio, budget.rows, self.answers.outcomes_of_texts(texts))
