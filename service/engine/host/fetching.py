"""Bringing back, for one question, the cold tokens of a windowed document that it needs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from service.engine.fetch.choose import choose_spans
from service.engine.host.cold import ColdDocument
from service.engine.host.context import HostContext
from service.engine.host.kept import Kept
from service.engine.host.residency import ResidentDocument
from service.engine.host.tails import Tail
from service.engine.messages import SpanRef
from service.engine.protocol import Rows


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
        self, document: ResidentDocument, tail: Tail, prompt_ids: Sequence[int], carried: Sequence[SpanRef]
    ) -> Fetched:
        """Find what the question needs and bring it; `carried` are the spans of the turn before. Raises SnapshotMiss
        for damage of the cold snapshot."""
        if self._kept.is_whole or not self._fetch_tokens or self._cold.index is None:
            return NOTHING
        started = time.monotonic()
        rows = Rows(tail.slot, document.handle, prompt_ids)
        queries = self._context.scheduler.run(self._context.runner.question_queries, rows, self._cold.index.heads)
        spans = choose_spans(
            self._cold.index.scores(queries, self._kept.verbatim),
            self._kept.segments,
            self._kept.n_tokens,
            resident=self._kept.verbatim,
            fetch_tokens=self._fetch_tokens,
            carried=carried,
            starts=self._cold.starts,
        )
        self.bring(tail, spans)
        return Fetched(tuple(spans), len(prompt_ids), (time.monotonic() - started) * 1e3)

    def bring(self, tail: Tail, spans: Sequence[SpanRef]) -> None:
        """Copy the rows of spans from the cold snapshot to the tail. Raises SnapshotMiss for damage."""
        if spans:
            blocks, n_tokens = self._cold.read(spans), sum(span.n_tokens for span in spans)
            bring = partial(self._context.runner.import_tail, fetched=True)
            self._context.scheduler.run(bring, tail.slot, blocks, n_tokens)
