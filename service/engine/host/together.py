"""Several documents in one document of the runner: some rows of each, gathered from their snapshots of all tokens.

Rows stand where they were computed, so that those of several documents share positions, as those of the segments of one
document do. Nothing of it is stored: it is a copy of a few blocks, whose records are verified as they are read.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from service.engine.digests import digest_of
from service.engine.host.canary import make_canary
from service.engine.host.cold import ColdDocument, gather
from service.engine.host.context import HostContext, complete, load_rows
from service.engine.host.fetching import Fetchable, Fetcher
from service.engine.host.kept import QUESTION_GAP, Subject, check_retention, together_ref
from service.engine.host.residency import ResidentDocument
from service.engine.messages import PartRef
from service.engine.scheduler.cancel import CancelToken

TOGETHER_VERSION = 1
"""Of how rows are put together: answers over other rows are other answers, and their KV is of no use."""


class SeveralDocuments:
    """The documents of a request with parts. Raises ValueError for ranges that are none of a document's tokens."""

    def __init__(self, context: HostContext, parts: Sequence[PartRef], fetch_tokens: int, pinned: bool) -> None:
        for part in parts:
            _check(part, context)
        self._context = context
        self._parts = parts
        self._pinned = pinned
        self._subjects = [
            Subject.of(context.runner, part.document, part.token_digest, part.n_tokens, part.retention)
            for part in parts
        ]
        self.fetch_tokens = fetch_tokens
        self.ref = together_ref([part.document for part in parts])
        self.ranges = [(number, *pair) for number, part in enumerate(parts) for pair in part.resident]
        self.n_resident = sum(last - first for part in parts for first, last in part.resident)
        ends = [subject.segments.next_position(subject.n_tokens) for subject in self._subjects]
        self.next_position = max(ends) + QUESTION_GAP
        last = self._subjects[-1]
        self.last_position = last.segments.last_position(last.n_tokens)
        self.digest = digest_of([TOGETHER_VERSION, self.next_position, *self._named()])

    @contextmanager
    def opened(self, cancel: CancelToken) -> Iterator[tuple[ResidentDocument, bool, Fetcher]]:
        """As `AnswerSource` says. Raises DocumentMiss for the document whose snapshot is missing or damaged."""
        context = self._context
        for subject in self._subjects:
            context.asked_about(subject)
        with ExitStack() as held:
            cold = [held.enter_context(context.cold.held(subject)) for subject in self._subjects]
            document, restored = held.enter_context(
                context.residency.held(
                    self.ref,
                    self.digest,
                    self.n_resident,
                    lambda entry: self._load(entry, cold, cancel),
                    cancel,
                    pinned=self._pinned,
                )
            )
            yield document, restored, self._fetcher(cold)

    def set_aside(self, why: str) -> None:
        """There is no snapshot of it: it is made anew from those of the documents."""

    def _named(self) -> list[int]:
        """All that the rows follow from."""
        numbers: list[int] = []
        for part, subject in zip(self._parts, self._subjects, strict=True):
            name = f"{subject.ref.owner_id} {subject.ref.document_id} {subject.token_digest}".encode()
            segments = subject.segments.segment_tokens, subject.segments.sink_tokens
            ranges = [number for pair in part.resident for number in pair]
            numbers += [len(name), *name, *segments, len(ranges), *ranges]
        return numbers

    def _load(self, entry: ResidentDocument, cold: Sequence[ColdDocument], cancel: CancelToken) -> None:
        """Its canary says what the rows gave when they were put together: one that comes back from the host's memory
        must agree. That of a document would be of no use, as only a part of its rows is here."""
        context = self._context
        if context.host_tier is not None and context.host_tier.bring_back(entry, cancel.check):
            entry.source = "host"
            return
        sources = [one.reader.source for one in cold if one.reader is not None]
        entry.source = next((source for source in sources if source != "disk"), "disk")
        tokens = [one.tokens_of(part.resident) for one, part in zip(cold, self._parts, strict=True)]
        blocks = gather(tokens, context.runner.layout)
        cancel.check()
        load_rows(context, entry, blocks)
        complete(context, entry, self)
        reader = cold[-1].reader
        assert reader is not None
        entry.last_token = int(reader.token_ids[-1])
        entry.canary = make_canary(context.last_logits(entry))
        entry.verified = True

    def _fetcher(self, cold: Sequence[ColdDocument]) -> Fetcher:
        documents = [
            Fetchable(one, subject.segments, subject.n_tokens, _covered(part.resident))
            for one, subject, part in zip(cold, self._subjects, self._parts, strict=True)
        ]
        return Fetcher(self._context, documents, self.next_position, self.fetch_tokens)


def _check(part: PartRef, context: HostContext) -> None:
    if part.retention is not None:
        check_retention(part.retention, context.runner.limits)
    edges = [edge for pair in part.resident for edge in pair]
    if not edges or edges != sorted(edges) or edges[0] < 0 or edges[-1] != part.n_tokens:
        raise ValueError(f"{part.resident} are not ranges of {part.n_tokens} tokens, in order, through the last one")


def _covered(resident: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What need not be fetched. Before the first resident token is the prompt that stands before a document's text: it
    is the same in each, and in memory once."""
    return [(0, resident[0][0]), *resident]
