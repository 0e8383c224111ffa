"""Building a document: the snapshot of all its tokens, and for a windowed one that of what stays resident."""

import logging
import time
from collections.abc import Callable

from cache_store.builder import SnapshotBuilder
from cache_store.errors import SnapshotMiss
from cache_store.reader import SnapshotReader
from service.engine.digests import digest_of
from service.engine.host.compact import Compaction
from service.engine.host.context import HostContext
from service.engine.host.kept import Kept, Subject, check_retention
from service.engine.host.opening import open_full, open_resident
from service.engine.host.prefill import Prefill
from service.engine.host.residency import ResidentDocument
from service.engine.host.scratch import scratch_rows
from service.engine.host.slots import open_slots
from service.engine.messages import BuildDone, BuildProgress, BuildRequest
from service.engine.scheduler.cancel import Cancelled, CancelToken, Reason

log = logging.getLogger(__name__)


class Build:
    """One build. `run` is called in a thread of its own, which writes while the engine's thread computes."""

    def __init__(
        self,
        context: HostContext,
        request: BuildRequest,
        emit: Callable[[BuildProgress], object],
        cancel: CancelToken,
    ) -> None:
        self._context = context
        self._request = request
        self._emit = emit
        self._cancel = cancel
        self._n_tokens = len(request.token_ids)
        digest = digest_of(request.token_ids)
        self._subject = Subject.of(context.runner, request.document, digest, self._n_tokens, request.retention)
        self._n_computed = 0
        self._n_resumed = 0

    def run(self) -> BuildDone:
        """Find or make what is missing. Raises Cancelled (the journal stays, unless the client asked for it or
        the document is being deleted), BuildLocked, BudgetExceeded, StorageFailed, DocumentTooLarge."""
        started = time.monotonic()
        if self._request.retention is not None:
            check_retention(self._request.retention, self._context.runner.limits)
        try:
            return self._build(started)
        except SnapshotMiss:
            # The cold snapshot was damaged, which shows when it is read; it was set aside, and is made anew.
            return self._build(started)

    def _build(self, started: float) -> BuildDone:
        nbytes = self._existing(open_full)
        found = nbytes is not None
        if nbytes is None:
            nbytes = self._compute()
        kept = self._subject.kept
        if kept is None:
            return self._done(started, nbytes, found)
        self._log_left_out(kept)
        rows_nbytes = self._existing_rows(kept)
        already = found and rows_nbytes is not None
        if rows_nbytes is None:
            rows_nbytes = self._compact(kept, found)
        return self._done(started, nbytes, already, kept, rows_nbytes, self._index(kept))

    def _existing_rows(self, kept: Kept) -> int | None:
        """Bytes of valid snapshots of all that is resident."""
        nbytes = self._existing(open_resident)
        slots_nbytes = self._existing(open_slots) if kept.slots else 0
        return None if nbytes is None or slots_nbytes is None else nbytes + slots_nbytes

    def _log_left_out(self, kept: Kept) -> None:
        retention = self._request.retention
        if retention is not None and retention.summary_tokens and not kept.slots and not kept.is_whole:
            log.info("no summary of %d tokens is kept: this engine has no slots", retention.summary_tokens)

    def _existing(self, open_one: Callable[..., SnapshotReader]) -> int | None:
        """Bytes of a valid snapshot of these very tokens; what is not valid is quarantined by the store."""
        try:
            with open_one(self._context.store, self._context.runner, self._subject) as reader:
                return reader.nbytes
        except SnapshotMiss:
            return None

    def _compute(self) -> int:
        """Prefill what the journal has not got; the bytes of the snapshot."""
        request, context, subject = self._request, self._context, self._subject
        runner = context.runner
        context.cold.drop(subject.ref)
        with context.store.begin(
            subject.full_key, runner.fingerprint, runner.layout, request.token_ids, segments=subject.segments
        ) as builder:
            prefill = Prefill(context, request.token_ids, subject.segments, self._emit, self._cancel)
            nbytes: list[int] = []
            is_all = subject.kept is None
            ref = subject.ref if is_all else subject.scratch
            if is_all and context.host_tier is not None:
                context.host_tier.forget(ref)
            try:
                with context.residency.held(
                    ref,
                    subject.token_digest,
                    scratch_rows(subject.segments, self._n_tokens),
                    lambda entry: nbytes.append(self._prefill(prefill, entry, builder, is_all=is_all)),
                    self._cancel,
                    fresh=True,
                ):
                    if not is_all:
                        context.residency.drop(ref)
            except Cancelled:
                if self._cancel.reason in (Reason.ASKED, Reason.RELEASED):
                    builder.abort()
                raise
        self._n_resumed = prefill.n_resumed
        self._n_computed = self._n_tokens - prefill.n_resumed
        return nbytes[0]

    def _prefill(self, prefill: Prefill, entry: ResidentDocument, builder: SnapshotBuilder, *, is_all: bool) -> int:
        """Compute, and take the time of it; bytes of the snapshot."""
        started = time.monotonic()
        nbytes = prefill.run(entry, builder, is_all=is_all)
        n_computed = self._n_tokens - prefill.n_resumed
        self._context.store.speeds.record_prefill(n_computed, time.monotonic() - started)
        return nbytes

    def _compact(self, kept: Kept, found: bool) -> int:
        request = self._request
        compaction = Compaction(self._context, self._subject, kept, request.token_ids, self._emit, self._cancel)
        return compaction.run(check_cold=found)

    def _index(self, kept: Kept) -> int:
        """Have the index in memory for the first question; its bytes."""
        if kept.is_whole or not self._context.cold.heads:
            return 0
        with self._context.cold.held(self._subject) as cold:
            return cold.nbytes

    def _done(
        self,
        started: float,
        nbytes: int,
        already: bool,
        kept: Kept | None = None,
        resident_nbytes: int = 0,
        index_nbytes: int = 0,
    ) -> BuildDone:
        return BuildDone(
            n_tokens=self._n_tokens,
            n_blocks=self._context.runner.layout.n_blocks(self._n_tokens),
            nbytes=nbytes,
            prefilled_tokens=self._n_computed,
            resumed_tokens=self._n_resumed,
            seconds=time.monotonic() - started,
            already=already,
            resident_tokens=0 if kept is None else kept.n_resident,
            summary_tokens=0 if kept is None else kept.slots,
            resident_nbytes=resident_nbytes,
            index_nbytes=index_nbytes,
        )
