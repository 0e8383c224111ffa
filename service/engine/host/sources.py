"""What an answer is given from: one document, kept whole or windowed, or several documents together."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from cache_store.errors import MissReason
from service.engine.host.context import HostContext, bring_in
from service.engine.host.fetching import Fetchable, Fetcher
from service.engine.host.kept import Subject, check_retention
from service.engine.host.looking import RowRanges
from service.engine.host.residency import ResidentDocument
from service.engine.host.together import SeveralDocuments
from service.engine.messages import AnswerRequest, DocumentRef
from service.engine.scheduler.cancel import CancelToken

Opened = tuple[ResidentDocument, bool, Fetcher | None]
"""A complete document of the runner, whether it was loaded for this answer, and what brings back the rest of it."""


class AnswerSource(Protocol):
    """`ref` and `digest` name the rows in memory, of which a head has `n_resident` in the mean; a session's turns begin
    at `next_position`. `fetch_tokens`: how many one question may bring back. `ranges`: which tokens the rows are."""

    @property
    def ref(self) -> DocumentRef: ...
    @property
    def digest(self) -> str: ...
    @property
    def n_resident(self) -> int: ...
    @property
    def next_position(self) -> int: ...
    @property
    def fetch_tokens(self) -> int: ...
    @property
    def ranges(self) -> RowRanges: ...

    @contextmanager
    def opened(self, cancel: CancelToken) -> Iterator[Opened]:
        """Held until the block ends. Raises SnapshotMiss, Cancelled, DocumentTooLarge and what the runner raises."""
        ...

    def set_aside(self, why: str) -> None:
        """Take the snapshot of what is in memory, if there is one, out of use: its canary does not agree."""
        ...


def source_of(context: HostContext, request: AnswerRequest) -> AnswerSource:
    """Raises ValueError for what no document can be."""
    if request.parts:
        return SeveralDocuments(context, request.parts, request.fetch_tokens, request.pinned)
    return OneDocument(context, request)


class OneDocument:
    """The document of a request without parts."""

    def __init__(self, context: HostContext, request: AnswerRequest) -> None:
        if request.retention is not None:
            check_retention(request.retention, context.runner.limits)
        self._context = context
        self._request = request
        names = request.document, request.token_digest, request.n_document_tokens
        self._subject = Subject.of(context.runner, *names, request.retention)
        self.ref = request.document
        self.digest = self._subject.digest
        self.n_resident = self._subject.n_resident
        self.next_position = self._subject.next_position
        self.fetch_tokens = request.retention.fetch_tokens if request.retention else 0
        kept = self._subject.kept
        verbatim = [(0, self._subject.n_tokens)] if kept is None else kept.verbatim
        self.ranges = [(0, first, last) for first, last in verbatim]

    @contextmanager
    def opened(self, cancel: CancelToken) -> Iterator[Opened]:
        subject = self._subject
        self._context.asked_about(subject, self._request.pinned)
        with (
            self._context.residency.held(
                subject.ref,
                subject.digest,
                subject.n_rows,
                lambda entry: bring_in(self._context, subject, entry, cancel.check),
                cancel,
                n_slot_rows=subject.n_slot_rows,
                pinned=self._request.pinned,
            ) as (document, restored),
            ExitStack() as held,
        ):
            yield document, restored, self._fetcher(held)

    def set_aside(self, why: str) -> None:
        store, digest = self._context.store, self._context.runner.fingerprint.digest
        store.quarantine(self._subject.key, digest, MissReason.CANARY, why)

    def _fetcher(self, held: ExitStack) -> Fetcher | None:
        """None where nothing is fetched, for this question or for a turn that may have to be computed again."""
        kept, cold = self._subject.kept, self._context.cold
        if kept is None or kept.is_whole:
            return None
        may_find = self.fetch_tokens and cold.heads
        if not may_find and not any(turn.spans for turn in self._request.turns):
            return None
        one = Fetchable(held.enter_context(cold.held(self._subject)), kept.segments, kept.n_tokens, kept.verbatim)
        return Fetcher(self._context, [one], kept.next_position, self.fetch_tokens)
