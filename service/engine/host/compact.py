"""Making the resident rows of a windowed document out of its cold snapshot: gathered, never computed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cache_store.errors import MissReason, SnapshotMiss
from cache_store.reader import SnapshotReader
from cache_store.rows import take_rows
from cache_store.store import SnapshotBuilder
from ingest.compaction import select_ragged
from service.engine.host.canary import CanaryMismatch, check_canary, make_canary
from service.engine.host.context import LOADS_AHEAD, HostContext, complete, load_rows
from service.engine.host.kept import Kept, Subject
from service.engine.host.opening import open_full
from service.engine.host.residency import ResidentDocument
from service.engine.host.scratch import Scratch, scratch_rows
from service.engine.host.slots import Places, SlotGatherer, SlotRecords, load_slots, write_slots
from service.engine.messages import BuildProgress
from service.engine.scheduler.cancel import Cancelled, CancelToken
from service.engine.scheduler.chunks import ChunkCancelled

REPLAY_TOKENS = 1024
"""Tokens repeated at a time. Of a larger part a small model loses its place."""
MIN_REPLAY_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Encoded rows, ``blocks[i][layer]``, and slots."""

    blocks: list[tuple[memoryview, ...]]
    slots: SlotRecords | None


class Compaction:
    """What is resident of one document: sinks and window, and of each head the tokens between them that a repetition of
    the document looks at most, as slots."""

    def __init__(
        self,
        context: HostContext,
        subject: Subject,
        kept: Kept,
        token_ids: list[int],
        emit: Callable[[BuildProgress], object],
        cancel: CancelToken,
    ) -> None:
        self._context = context
        self._subject = subject
        self._kept = kept
        self._tokens = token_ids
        self._emit = emit
        self._cancel = cancel

    def run(self, *, check_cold: bool) -> int:
        """Make and publish it; the document then is in memory. The bytes of the snapshots of rows and slots.

        With `check_cold` the canary of the cold snapshot must agree, which is not needed where it was just computed.
        Raises SnapshotMiss when the cold snapshot is not there or is damaged, Cancelled, and what storing raises.
        """
        context, subject, kept = self._context, self._subject, self._kept
        runner = context.runner
        with (
            open_full(context.store, runner, subject) as reader,
            # Before the work: its room on disk is reserved, and no one else makes the same, slots included.
            context.store.begin(
                subject.key,
                runner.fingerprint,
                runner.layout,
                kept.row_tokens(self._tokens),
                context_digest=subject.digest,
                next_position=kept.next_position,
                last_position=kept.last_position,
            ) as builder,
        ):
            places = self._places(reader, check_cold)
            gathered = self._gather(reader, places)
            self._cancel.check()
            self._emit(BuildProgress("persisting", kept.n_tokens, kept.n_tokens))
            return self._publish(builder, gathered, places)

    def _places(self, reader: SnapshotReader, check_cold: bool) -> Places:
        """Which tokens are slots; none at all without."""
        replayed = self._kept.slots > 0
        scores: list[torch.Tensor] = []
        if replayed or check_cold:
            residency = self._context.residency
            with residency.held(
                self._subject.scratch,
                self._subject.token_digest,
                scratch_rows(self._kept.segments, self._kept.n_tokens),
                lambda entry: scores.extend(self._replay(entry, reader, replayed, check_cold)),
                self._cancel,
                fresh=True,
            ):
                residency.drop(self._subject.scratch)
        if not replayed:
            return []
        chosen = select_ragged(torch.cat(scores, -1), self._kept.slots)
        return [[head.numpy() + self._kept.sinks for head in layer] for layer in chosen]

    def _replay(
        self, entry: ResidentDocument, reader: SnapshotReader, replayed: bool, check_cold: bool
    ) -> list[torch.Tensor]:
        """Scores of the tokens between sinks and window, ``[n_layers, n_kv_heads, n]`` of one part after another."""
        scratch = Scratch(self._context, self._kept.segments, self._kept.n_tokens)
        entry.handle = scratch.handle
        scores: list[torch.Tensor] = []
        for segment, (_, last) in enumerate(scratch.ranges):
            is_last = segment == len(scratch.ranges) - 1
            if replayed or is_last:
                scratch.load(segment, last, reader.read_blocks, self._cancel.check)
            if check_cold and is_last:
                self._check_cold(entry, reader)
            if replayed:
                scores += self._replay_segment(scratch, segment)
        return scores

    def _replay_segment(self, scratch: Scratch, segment: int) -> list[torch.Tensor]:
        first, last = scratch.ranges[segment]
        first, last = max(first, self._kept.middle[0]), min(last, self._kept.middle[1])
        begin, end = self._kept.middle
        step, scores = self._replay_tokens(), []
        for at in range(first, last, step):
            stop = min(at + step, last)
            tokens = [*self._context.replay_ids, *self._tokens[at:stop]]
            rows = scratch.row(segment, at), scratch.row(segment, stop - 1) + 1
            scores.append(self._replay_part(scratch, tokens, *rows))
            self._emit(BuildProgress("compacting", stop - begin, end - begin))
        return scores

    def _replay_part(self, scratch: Scratch, tokens: list[int], first: int, last: int) -> torch.Tensor:
        cancel = self._cancel
        replay = self._context.scheduler.replay(
            scratch.handle, tokens, self._kept.sinks, first, last, lambda: cancel.cancelled
        )
        try:
            return replay.result()
        except ChunkCancelled as error:
            raise Cancelled(str(error)) from None

    def _replay_tokens(self) -> int:
        """Tokens to repeat at a time: what is repeated follows the segment within the model's context."""
        n_rows = scratch_rows(self._kept.segments, self._kept.n_tokens)
        room = self._context.runner.limits.max_context - n_rows - len(self._context.replay_ids)
        return max(min(REPLAY_TOKENS, room), MIN_REPLAY_TOKENS)

    def _check_cold(self, entry: ResidentDocument, reader: SnapshotReader) -> None:
        """Bytes that another engine wrote may mean something else to this one, and rows gathered from them would carry
        that on under a canary of their own."""
        context, subject = self._context, self._subject
        entry.last_token = self._tokens[-1]
        try:
            check_canary(reader.canary, context.last_logits(entry), context.runner.compute_dtype)
        except CanaryMismatch as error:
            digest = context.runner.fingerprint.digest
            context.store.quarantine(subject.full_key, digest, MissReason.CANARY, str(error))
            raise SnapshotMiss(MissReason.CANARY, str(error)) from None

    def _gather(self, reader: SnapshotReader, places: Places) -> _Gathered:
        runner, n_tokens, by_layer = self._context.runner, self._kept.n_tokens, []
        slots = SlotGatherer(runner, places, n_tokens) if places else None
        for layer in range(runner.layout.n_layers):
            self._cancel.check()
            records = [run[2] for run in reader.read_layer(layer)]
            by_layer.append(take_rows(records, n_tokens, runner.layout, self._kept.rows))
            if slots is not None:
                slots.add(records)
        return _Gathered(list(zip(*by_layer, strict=True)), slots.slots if slots else None)

    def _publish(self, builder: SnapshotBuilder, gathered: _Gathered, places: Places) -> int:
        context, subject = self._context, self._subject
        if context.host_tier is not None:
            context.host_tier.forget(subject.ref)
        done: list[int] = []

        def fill(entry: ResidentDocument) -> None:
            self._load(entry, gathered)
            if gathered.slots is not None:
                done.append(write_slots(context.store, context.runner, subject, gathered.slots, places))
            for records in gathered.blocks:
                builder.append(records)
            done.append(builder.publish(canary=entry.canary).nbytes)

        with context.residency.held(
            subject.ref,
            subject.digest,
            subject.n_rows,
            fill,
            self._cancel,
            n_slot_rows=subject.n_slot_rows,
            fresh=True,
        ):
            return sum(done)

    def _load(self, entry: ResidentDocument, gathered: _Gathered) -> None:
        """Into memory, for the canary and for the first question."""
        context, runner = self._context, self._context.runner
        load_rows(context, entry, gathered.blocks)
        if gathered.slots is not None:
            check = self._cancel.check
            load_slots(context.scheduler, runner, entry.handle, gathered.slots, check, LOADS_AHEAD)
            entry.slot_places = gathered.slots.places(runner.watched_heads)
        complete(context, entry, self._kept)
        entry.last_token = self._tokens[-1]
        entry.lookup = context.lookup_of(self._kept.row_tokens(self._tokens))  # as a restore has it
        entry.canary = make_canary(context.last_logits(entry))
        entry.verified = True
