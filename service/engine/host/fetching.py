"""Bringing back, for one question, the cold tokens that it needs of a windowed document, or of several documents."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch

from cache_store.segments import Segments
from service.engine.drafts.lookup import DocumentLookup
from service.engine.fetch.choose import Choices, best_passage, choose_among
from service.engine.fetch.coverage import both
from service.engine.fetch.index import KeyIndex, Look, looks_among
from service.engine.fetch.recurring import join, recurring
from service.engine.host.cold import ColdDocument, gather
from service.engine.host.context import HostContext
from service.engine.host.residency import ResidentDocument
from service.engine.host.tails import Tail
from service.engine.messages import SpanRef, TurnRef
from service.engine.protocol import Rows

PRIOR_TOKENS = 64
"""Tokens of the turn before that are looked for again: "Which code opens it?" does not say of what. With the demo model
and six facts, such questions found the sentence 10 of 18 times without and 18 of 18 times with it, and those that name
another thing 12 of 12 times either way."""

Looks = Callable[[torch.Tensor], list[Look]]


@dataclass(frozen=True, slots=True)
class Fetched:
    """What is in the tail for a question, and what finding it took."""

    spans: tuple[SpanRef, ...] = ()
    first_pass_tokens: int = 0
    ms: float = 0.0
    second_pass_tokens: int = 0


NOTHING = Fetched()


@dataclass(frozen=True, slots=True)
class Fetchable:
    """A document of an answer, held; its tokens in `resident`, ranges ``[first, last)``, need not be fetched."""

    cold: ColdDocument
    segments: Segments
    n_tokens: int
    resident: Sequence[tuple[int, int]]


class Fetcher:
    """Of one answer over one or several documents. Each tail has fetched rows until they are dropped, behind its turns.

    `next_position`: where the turns begin.
    """

    def __init__(
        self, context: HostContext, documents: Sequence[Fetchable], next_position: int, fetch_tokens: int
    ) -> None:
        self._context = context
        self._documents = documents
        self._next_position = next_position
        self._fetch_tokens = fetch_tokens

    @property
    def lookups(self) -> list[DocumentLookup]:
        """Where all tokens of the documents are found again."""
        return [one.cold.lookup for one in self._documents if one.cold.lookup is not None]

    def fetch(
        self, document: ResidentDocument, tail: Tail, prompt_ids: Sequence[int], before: TurnRef | None
    ) -> Fetched:
        """Find what the question needs and bring it; `before` is the turn before. Raises SnapshotMiss for damage of a
        cold snapshot."""
        indexes = [index for one in self._documents if (index := one.cold.index) is not None]
        if not self._fetch_tokens or len(indexes) < len(self._documents):
            return NOTHING
        started = time.monotonic()
        prior = before.token_ids[: self._n_prior(tail, prompt_ids)] if before else []
        choices = self._choices(self._looks(indexes, document, tail, prior, prompt_ids))
        n_second = 0
        if self._context.fetch_rounds > 1:
            choices, n_second = self._second_round(indexes, document, tail, prompt_ids, choices)
        carried = before.spans if before else ()
        spans = choose_among(choices, fetch_tokens=self._fetch_tokens, carried=carried)
        self.bring(tail, spans)
        ms = (time.monotonic() - started) * 1e3
        return Fetched(tuple(spans), len(prior) + len(prompt_ids), ms, n_second)

    def _choices(self, looks: Sequence[Look]) -> list[Choices]:
        return [
            Choices(look, one.segments, one.n_tokens, one.resident, one.cold.starts)
            for look, one in zip(looks, self._documents, strict=True)
        ]

    def _second_round(
        self,
        indexes: Sequence[KeyIndex],
        document: ResidentDocument,
        tail: Tail,
        prompt_ids: Sequence[int],
        choices: Sequence[Choices],
    ) -> tuple[list[Choices], int]:
        """Look for what the best passage names, when that stands elsewhere too: the passage is computed like a
        question. How many tokens that took, 0 for none."""
        number, first, last = best_passage(choices)
        last = min(last, first + self._n_passage(tail))
        token_ids = [one.cold.reader.token_ids for one in self._documents if one.cold.reader is not None]
        named = [place - first for place in recurring(token_ids, number, first, last, prompt_ids)]
        if not named:
            return list(choices), 0
        resident = [[*one.resident, (first, last)] if i == number else one.resident for i, one in enumerate(choices)]
        rows = Rows(tail.slot, document.handle, token_ids[number][first:last].tolist())
        found = self._ask(indexes, rows, lambda queries: looks_among(indexes, queries[:, :, named], resident))
        return self._choices(join([one.look for one in choices], found)), last - first

    def _n_passage(self, tail: Tail) -> int:
        """Tokens of a passage at most: no more than fetched rows have room in the tail, and within the context."""
        end = self._next_position + tail.n_tokens
        return max(min(self._fetch_tokens, self._context.runner.limits.max_context - end), 0)

    def _looks(
        self,
        indexes: Sequence[KeyIndex],
        document: ResidentDocument,
        tail: Tail,
        prior: Sequence[int],
        prompt_ids: Sequence[int],
    ) -> list[Look]:
        """For each document a look at each span, from the question and, at half weight, from the beginning of the
        turn before."""
        resident = [one.resident for one in self._documents]

        def looks(queries: torch.Tensor) -> list[Look]:
            now = looks_among(indexes, queries[:, :, len(prior) :], resident)
            if not prior:
                return now
            earlier = looks_among(indexes, queries[:, :, : len(prior)], resident)
            return [both(one, other, 0.5) for one, other in zip(now, earlier, strict=True)]

        return self._ask(indexes, Rows(tail.slot, document.handle, [*prior, *prompt_ids]), looks)

    def _ask(self, indexes: Sequence[KeyIndex], rows: Rows, looks: Looks) -> list[Look]:
        """How the queries of rows look at the documents. A device is for the engine's thread alone; on a processor
        scoring must not keep others waiting."""
        run, find = self._context.scheduler.run, self._context.runner.question_queries
        heads = indexes[0].heads
        if all(index.device.type == "cpu" for index in indexes):
            return looks(run(find, rows, heads))
        return run(lambda: looks(find(rows, heads)))

    def _n_prior(self, tail: Tail, prompt_ids: Sequence[int]) -> int:
        """How many tokens of the turn before may stand in front of the question: no more than fetched rows have room
        in the tail, and within the model's context."""
        end = self._next_position + tail.n_tokens + len(prompt_ids)
        return max(min(PRIOR_TOKENS, self._fetch_tokens, self._context.runner.limits.max_context - end), 0)

    def bring(self, tail: Tail, spans: Sequence[SpanRef]) -> None:
        """Copy the rows of spans from cold snapshots to the tail. Raises SnapshotMiss for damage."""
        if spans:
            by_document = groupby(spans, key=lambda span: span.document)
            parts = [self._documents[number].cold.tokens_of(_ranges(group)) for number, group in by_document]
            blocks, n_tokens = gather(parts, self._context.runner.layout), sum(span.n_tokens for span in spans)
            bring = partial(self._context.runner.import_tail, fetched=True)
            self._context.scheduler.run(bring, tail.slot, blocks, n_tokens)


def _ranges(spans: Iterable[SpanRef]) -> list[tuple[int, int]]:
    return [(span.first, span.first + span.n_tokens) for span in spans]
