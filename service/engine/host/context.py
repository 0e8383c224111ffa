"""What every build and answer works with, and the small things they share."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from cache_store.errors import MissReason, SnapshotMiss, StorageFailed
from cache_store.pieces import Piece, Run
from cache_store.reader import SnapshotReader
from cache_store.store import SnapshotStore
from service.engine.drafts.lookup import DocumentLookup
from service.engine.host.cold import ColdDocuments
from service.engine.host.host_tier import HostTier
from service.engine.host.kept import Subject
from service.engine.host.opening import open_resident
from service.engine.host.residency import Residency, ResidentDocument
from service.engine.host.slots import SlotRecords, load_slots, open_slots, read_slots
from service.engine.host.tails import TailPool
from service.engine.host.window import Window
from service.engine.messages import DocumentRef
from service.engine.protocol import Rows, Runner
from service.engine.scheduler.admission import FifoGate
from service.engine.scheduler.detokenizer import Decoder
from service.engine.scheduler.loop import Scheduler

if TYPE_CHECKING:
    from service.engine.host.draft.side import DraftSide

LOADS_AHEAD = 4
"""Verified pieces that may wait for the engine's thread, so that a restore's memory is bounded."""


@dataclass(frozen=True, slots=True)
class HostContext:
    """`end_ids` end an answer; `decoder` turns ids into text. `replay_ids` ask the model to repeat what it sees.
    `host_tier`: where documents go that leave the device, None where the device is the host. `looks_up`: whether
    documents' tokens are found again in them. `draft`: where a draft model keeps what it read of documents, which has
    another context for that."""

    runner: Runner
    scheduler: Scheduler
    store: SnapshotStore
    residency: Residency
    tails: TailPool
    gate: FifoGate
    cold: ColdDocuments
    decoder: Decoder
    end_ids: frozenset[int]
    replay_ids: tuple[int, ...] = ()
    host_tier: HostTier | None = None
    fetch_rounds: int = 1
    looks_up: bool = True
    draft: "DraftSide | None" = None

    def lookup_of(self, token_ids: Sequence[int] | npt.NDArray[np.integer]) -> DocumentLookup | None:
        """Where a document's tokens are found again; None where nothing is drafted."""
        return DocumentLookup(token_ids) if self.looks_up and self.scheduler.planner is not None else None

    def forget(self, ref: DocumentRef) -> None:
        """Take a document out of use, in every memory; whoever uses it may finish."""
        self.residency.drop(ref)
        if self.host_tier is not None:
            self.host_tier.forget(ref)

    def asked_about(self, subject: Subject, pinned: bool | None = None) -> None:
        """Count a use of a document's snapshot, also of one in memory; `pinned` None says nothing."""
        if pinned is not None:
            with suppress(StorageFailed):
                self.store.pin(subject.full_key, pinned)
        self.store.used(subject.full_key, self.runner.fingerprint.digest)

    def last_logits(self, document: ResidentDocument) -> Any:
        """Logits at a document's last token, by a step of its own."""
        return self.scheduler.run(self._probe, document.handle, document.last_token)

    def decode_one(self) -> None:
        """A step of one token without a document."""
        self.scheduler.run(self._probe, None, 0)

    def _probe(self, handle: Any, token: int) -> Any:
        spare = self.tails.spare
        logits = self.runner.forward([Rows(spare, handle, [token], refeed=handle is not None)])
        self.runner.truncate_tail(spare, 0)
        return logits[0][0]


def bring_in(
    context: HostContext, subject: Subject, entry: ResidentDocument, check: Callable[[], None] = lambda: None
) -> None:
    """Fill a new document of the runner with what of `subject` is resident: from host memory, else from disk.

    `check` is called in between and may raise to give up. Raises SnapshotMiss and what the runner raises.
    """
    if context.host_tier is not None and context.host_tier.bring_back(entry, check):
        entry.source = "host"
        return
    slots = _read_slots(context, subject)  # before memory is taken: a miss is seen at once
    with open_resident(context.store, context.runner, subject) as reader:
        if reader.n_tokens != subject.n_rows:
            raise SnapshotMiss(MissReason.TRUNCATED, f"{reader.n_tokens} tokens, not {subject.n_rows}")
        entry.source = reader.source
        started = time.monotonic()
        _restore(context, reader, entry, check)
        if reader.source == "disk":
            context.store.speeds.record_bytes("disk", reader.nbytes, time.monotonic() - started)
        if slots is not None:
            load_slots(context.scheduler, context.runner, entry.handle, slots, check, LOADS_AHEAD)
            entry.slot_places = slots.places(context.runner.watched_heads)
        complete(context, entry, subject.kept)


def load_rows(context: HostContext, entry: ResidentDocument, blocks: Sequence[Sequence[memoryview]]) -> None:
    """Make a document of the runner and fill it with gathered rows, ``blocks[i][layer]``. What raises leaves it
    unusable."""
    run, runner, at = context.scheduler.run, context.runner, 0
    entry.handle = run(runner.new_document, entry.n_tokens)
    for records, n_rows in zip(blocks, runner.layout.block_lengths(entry.n_tokens), strict=True):
        for layer, record in enumerate(records):
            run(runner.load_blocks, entry.handle, layer, at, record, n_rows)
        at += n_rows


def _read_slots(context: HostContext, subject: Subject) -> SlotRecords | None:
    if not subject.n_slot_rows:
        return None
    with open_slots(context.store, context.runner, subject) as reader:
        return read_slots(reader)


def _restore(context: HostContext, reader: SnapshotReader, entry: ResidentDocument, check: Callable[[], None]) -> None:
    """Load a snapshot, each piece after it was verified. What raises leaves the document unusable."""
    run, runner = context.scheduler.call, context.runner
    entry.handle = run(runner.new_document, reader.n_tokens).result()
    loads = Window(LOADS_AHEAD)
    for piece in reader.pieces(runner.load_buffers):
        loads.add(_load(context, entry.handle, piece))
        check()
    loads.finish()
    entry.last_token = int(reader.token_ids[-1])
    entry.lookup = context.lookup_of(reader.token_ids)
    entry.canary = reader.canary


class Positions(Protocol):
    """Those of `Resident`."""

    @property
    def next_position(self) -> int: ...
    @property
    def last_position(self) -> int: ...


def complete(context: HostContext, entry: ResidentDocument, positions: Positions | None) -> None:
    """Declare all rows of a document present; with `positions` they need not be consecutive tokens."""
    finish = context.runner.finish_load
    if positions is not None:
        entry.next_position, entry.last_position = positions.next_position, positions.last_position
        finish = partial(finish, next_position=positions.next_position, last_position=positions.last_position)
    context.scheduler.run(finish, entry.handle, entry.n_tokens)


def _load(context: HostContext, handle: Any, piece: Piece) -> "Future[None]":
    """Load a piece on the engine's thread; its memory is given back whatever comes of it."""
    try:
        done = context.scheduler.call(_load_runs, context.runner, handle, piece.runs)
    except BaseException:
        piece.release()
        raise
    done.add_done_callback(lambda _: piece.release())
    return done


def _load_runs(runner: Runner, handle: Any, runs: list[Run]) -> None:
    for layer, first, records, n_tokens in runs:
        runner.load_blocks(handle, layer, first, records, n_tokens)
