"""Computing a document: chunk by chunk, segment by segment, each block on disk before it counts as done."""

from collections.abc import Callable, Sequence
from contextlib import closing

from cache_store.segments import Segments
from cache_store.store import SnapshotBuilder
from service.engine.host.canary import make_canary
from service.engine.host.context import HostContext
from service.engine.host.residency import ResidentDocument
from service.engine.host.scratch import Scratch
from service.engine.host.window import Window
from service.engine.messages import BuildProgress
from service.engine.scheduler.cancel import Cancelled, CancelToken
from service.engine.scheduler.chunks import ChunkCancelled

CHUNKS_AHEAD = 1
"""Chunks computed while an earlier one is written: more would be lost with the process, and gain nothing."""


class Prefill:
    """The tokens of one document, cut as `segments` says, into one builder, whose journal it goes on from."""

    def __init__(
        self,
        context: HostContext,
        token_ids: Sequence[int],
        segments: Segments,
        emit: Callable[[BuildProgress], object],
        cancel: CancelToken,
    ) -> None:
        self._context = context
        self._tokens = token_ids
        self._segments = segments
        self._emit = emit
        self._cancel = cancel
        self._n_tokens = len(token_ids)
        self._n_written = 0
        self._failed = False
        self.n_resumed = 0
        """Tokens that came from the journal."""

    def run(self, entry: ResidentDocument, builder: SnapshotBuilder, *, is_all: bool) -> int:
        """Compute what the builder has not got, and publish. The bytes of the snapshot; `entry` then holds the last
        segment, which is all of a document that is not cut. Raises Cancelled and what storing raises.

        `is_all`: nothing is made from the snapshot afterwards, so that publishing it is the last stage.
        """
        scratch = Scratch(self._context, self._segments, self._n_tokens)
        entry.handle = scratch.handle
        self._compute(scratch, builder)
        entry.last_token = self._tokens[-1]
        entry.lookup = self._context.lookup_of(self._tokens) if is_all else None
        entry.canary = make_canary(self._context.last_logits(entry))
        entry.verified = True
        self._cancel.check()
        if is_all:
            self._emit(BuildProgress("persisting", self._n_tokens, self._n_tokens))
        return builder.publish(canary=entry.canary).nbytes

    def _compute(self, scratch: Scratch, builder: SnapshotBuilder) -> None:
        first = self._resume(scratch, builder)
        self._n_written = self.n_resumed // self._context.runner.layout.block_tokens
        for segment in range(first, len(scratch.ranges)):
            if segment > first:
                scratch.begin(segment)
            self._prefill(scratch, segment, builder)

    def _resume(self, scratch: Scratch, builder: SnapshotBuilder) -> int:
        """Load what the journal has of the segment it ends in, up to a chunk boundary: going on there equals not
        having stopped. That segment."""
        limits, done = self._context.runner.limits, sum(self._lengths[: builder.n_blocks_done])
        segment = self._segments.segment(min(done, self._n_tokens - 1))
        if done < self._n_tokens:
            done -= (done - scratch.ranges[segment][0]) % limits.chunk_tokens
        self.n_resumed = done
        if done:
            scratch.load(
                segment, done, lambda blocks: [[memoryview(r) for r in builder.block_records(b)] for b in blocks]
            )
            self._emit(BuildProgress("prefilling", done, self._n_tokens))
        return segment

    @property
    def _lengths(self) -> list[int]:
        return self._context.runner.layout.block_lengths(self._n_tokens)

    def _prefill(self, scratch: Scratch, segment: int, builder: SnapshotBuilder) -> None:
        scheduler, runner = self._context.scheduler, self._context.runner
        chunk, (first, last) = runner.limits.chunk_tokens, scratch.ranges[segment]
        try:
            # All of a segment is computed before the next begins, which takes its place.
            with closing(Window(CHUNKS_AHEAD, lambda blocks: self._write(builder, blocks))) as window:
                for at in range(max(first, self.n_resumed), last, chunk):
                    part = self._tokens[at : min(at + chunk, last)]
                    window.add(scheduler.prefill(scratch.handle, part, self._is_over, runner))
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
