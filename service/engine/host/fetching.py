"""Bringing back, for one question, the cold tokens of a windowed document that it needs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from service.engine.fetch.choose import choose_spans
from service.engine.fetch.index import KeyIndex
from service.engine.host.cold import ColdDocument
from service.engine.host.context import HostContext
from service.engine.host.kept import Kept
from service.engine.host.residency import ResidentDocument
from service.engine.host.tails import Tail
from service.engine.messages import SpanRef, TurnRef
from service.engine.protocol import Rows

PRIOR_TOKENS = 64
"""Tokens of the turn before that are looked for again: "Which code opens it?" does not say of what. With the demo model
and six facts, such questions found the sentence 10 of 18 times without and 18 of 18 times with it, and those that name
another thing 12 of 12 times either way."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What is in the tail for a question, and what finding it took."""

    spans: tuple[SpanRef, ...] = ()
    first_pass_tokens: int = 0
    ms: float = 0.0


NOTHING = Fetched()


class Fetcher:
    """Of one answer over a windowed document. Each tail has fetched rows until they are dropped, behind its turns."""

    def __init__(self, context: HostContext, cold: ColdDocument, kept: Kept, fetch_tokens: int) -> None:
        self._context = context
        self._cold = cold
        self._kept = kept
        self._fetch_tokens = fetch_tokens

    def fetch(
        self, document: ResidentDocument, tail: Tail, prompt_ids: Sequence[int], before: TurnRef | None
    ) -> Fetched:
        """Find what the question needs and bring it; `before` is the turn before. Raises SnapshotMiss for damage of the
        cold snapshot."""
        if self._kept.is_whole or not self._fetch_tokens or self._cold.index is None:
            return NOTHING
        started = time.monotonic()
        prior = before.token_ids[: self._n_prior(tail, prompt_ids)] if before else []
        spans = choose_spans(
            self._scores(self._cold.index, document, tail, prior, prompt_ids),
            self._kept.segments,
            self._kept.n_tokens,
            resident=self._kept.verbatim,
            fetch_tokens=self._fetch_tokens,
            carried=before.spans if before else (),
            starts=self._cold.starts,
        )
        self.bring(tail, spans)
        return Fetched(tuple(spans), len(prior) + len(prompt_ids), (time.monotonic() - started) * 1e3)

    def _scores(
        self,
        index: KeyIndex,
        document: ResidentDocument,
        tail: Tail,
        prior: Sequence[int],
        prompt_ids: Sequence[int],
    ) -> torch.Tensor:
        """A figure for each span, from the question and, at half weight, from the beginning of the turn before.

        A device is for the engine's thread alone; on a processor scoring must not keep others waiting.
        """
        run, find = self._context.scheduler.run, self._context.runner.question_queries
        rows = Rows(tail.slot, document.handle, [*prior, *prompt_ids])

        def figures(queries: torch.Tensor) -> torch.Tensor:
            scores = index.scores(queries[:, :, len(prior) :], self._kept.verbatim)
            if prior:
                scores = torch.maximum(scores, index.scores(queries[:, :, : len(prior)], self._kept.verbatim) / 2)
            return scores

        if index.device.type == "cpu":
            return figures(run(find, rows, index.heads))
        return run(lambda: figures(find(rows, index.heads)))

    def _n_prior(self, tail: Tail, prompt_ids: Sequence[int]) -> int:
        """How many tokens of the turn before may stand in front of the question: no more than fetched rows have room
        in the tail, and within the model's context."""
        end = self._kept.next_position + tail.n_tokens + len(prompt_ids)
        return max(min(PRIOR_TOKENS, self._fetch_tokens, self._context.runner.limits.max_context - end), 0)

    def bring(self, tail: Tail, spans: Sequence[SpanRef]) -> None:
        """Copy the rows of spans from the cold snapshot to the tail. Raises SnapshotMiss for damage."""
        if spans:
            blocks, n_tokens = self._cold.read(spans), sum(span.n_tokens for span in spans)
            bring = partial(self._context.runner.import_tail, fetched=True)
            self._context.scheduler.run(bring, tail.slot, blocks, n_tokens)
