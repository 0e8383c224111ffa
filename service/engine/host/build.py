"""Building a document's snapshot: prefill chunk by chunk, each block on disk before it counts as done."""

import time
from collections.abc import Callable
from contextlib import closing

from cache_store.errors import SnapshotMiss
from cache_store.store import SnapshotBuilder
from service.engine.digests import digest_of
from service.engine.host.canary import make_canary
from service.engine.host.context import HostContext, document_key
from service.engine.host.residency import ResidentDocument
from service.engine.host.window import Window
from service.engine.messages import BuildDone, BuildProgress, BuildRequest
from service.engine.scheduler.cancel import Cancelled, CancelToken, Reason
from service.engine.scheduler.chunks import ChunkCancelled

CHUNKS_AHEAD = 1
"""Chunks computed while an earlier one is written: more would be lost with the process, and gain nothing."""


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
        self._n_resumed = 0
        self._n_written = 0
        self._nbytes = 0
        self._failed = False

    def run(self) -> BuildDone:
        """Find or make the snapshot. Raises Cancelled (the journal stays, unless the client asked for it or
        the document is being deleted), BuildLocked, BudgetExceeded, StorageFailed, DocumentTooLarge."""
        started = time.monotonic()
        if (found := self._existing()) is not None:
            return self._done(found, 0, started, already=True)
        request, context = self._request, self._context
        key, runner = document_key(request.document), context.runner
        with context.store.begin(key, runner.fingerprint, runner.layout, request.token_ids) as builder:
            try:
                self._compute(builder)
            except Cancelled:
                if self._cancel.reason in (Reason.ASKED, Reason.RELEASED):
                    builder.abort()
                raise
        return self._done(self._nbytes, self._n_tokens - self._n_resumed, started)

    def _existing(self) -> int | None:
        """Bytes of a valid snapshot of these very tokens; what is not valid is quarantined by the store."""
        key, runner = document_key(self._request.document), self._context.runner
        digest = digest_of(self._request.token_ids)
        try:
            with self._context.store.open(key, runner.fingerprint, runner.layout, token_digest=digest) as reader:
                return reader.nbytes
        except SnapshotMiss:
            return None

    def _compute(self, builder: SnapshotBuilder) -> None:
        digest = digest_of(self._request.token_ids)
        ref, cancel, tier = self._request.document, self._cancel, self._context.host_tier
        if tier is not None:
            tier.forget(ref)
        with self._context.residency.held(
            ref, digest, self._n_tokens, lambda entry: self._fill(entry, builder), cancel, fresh=True
        ):
            pass

    def _fill(self, entry: ResidentDocument, builder: SnapshotBuilder) -> None:
        scheduler, runner = self._context.scheduler, self._context.runner
        entry.handle = scheduler.run(runner.new_document, self._n_tokens)
        self._resume(entry, builder)
        self._prefill(entry, builder)
        entry.last_token = self._request.token_ids[-1]
        entry.canary = make_canary(self._context.last_logits(entry))
        entry.verified = True
        self._cancel.check()
        self._emit(BuildProgress("persisting", self._n_tokens, self._n_tokens))
        manifest = builder.publish(canary=entry.canary)
        self._nbytes = manifest.nbytes

    def _resume(self, entry: ResidentDocument, builder: SnapshotBuilder) -> None:
        """Load what the journal has, up to a chunk boundary: going on there equals not having stopped."""
        scheduler, runner = self._context.scheduler, self._context.runner
        lengths = runner.layout.block_lengths(self._n_tokens)
        self._n_resumed = sum(lengths[: builder.n_blocks_done])
        if self._n_resumed < self._n_tokens:
            self._n_resumed -= self._n_resumed % runner.limits.chunk_tokens
        if not self._n_resumed:
            return
        first, loads = 0, Window(2 * runner.layout.n_layers)
        for block, n_tokens in enumerate(lengths[: runner.layout.n_blocks(self._n_resumed)]):
            for layer, record in enumerate(builder.block_records(block)):
                view = memoryview(record)
                loads.add(scheduler.call(runner.load_blocks, entry.handle, layer, first, view, n_tokens))
            first += n_tokens
        loads.finish()
        scheduler.run(runner.finish_load, entry.handle, self._n_resumed)
        self._emit(BuildProgress("prefilling", self._n_resumed, self._n_tokens))

    def _prefill(self, entry: ResidentDocument, builder: SnapshotBuilder) -> None:
        chunk, tokens = self._context.runner.limits.chunk_tokens, self._request.token_ids
        self._n_written = self._n_resumed // self._context.runner.layout.block_tokens
        try:
            with closing(Window(CHUNKS_AHEAD, lambda blocks: self._write(builder, blocks))) as window:
                for first in range(self._n_resumed, self._n_tokens, chunk):
                    part = tokens[first : first + chunk]
                    window.add(self._context.scheduler.prefill(entry.handle, part, self._is_over))
                window.finish()
        except ChunkCancelled as error:
            raise Cancelled(str(error)) from None

    def _is_over(self) -> bool:
        return self._failed or self._cancel.cancelled

    def _write(self, builder: SnapshotBuilder, blocks: list[list[memoryview]]) -> None:
        """Append the blocks of a chunk, less those that the journal has already."""
        for records in blocks:
            if self._n_written >= builder.n_blocks_done:
                self._append(builder, records)
            self._n_written += 1
            n_durable = self._n_written * self._context.runner.layout.block_tokens
            self._emit(BuildProgress("prefilling", min(n_durable, self._n_tokens), self._n_tokens))

    def _append(self, builder: SnapshotBuilder, records: list[memoryview]) -> None:
        try:
            builder.append(records)
        except BaseException:
            self._failed = True
            raise

    def _done(self, nbytes: int, n_computed: int, started: float, already: bool = False) -> BuildDone:
        n_blocks = self._context.runner.layout.n_blocks(self._n_tokens)
        seconds = time.monotonic() - started
        return BuildDone(self._n_tokens, n_blocks, nbytes, n_computed, self._n_resumed, seconds, already=already)
