"""The disk tier: snapshots under one directory, for any number of processes at once."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from cache_store import inventory
from cache_store.area import Area, Removed
from cache_store.budget import Ledger, free_nbytes
from cache_store.builder import SnapshotBuilder
from cache_store.disk import Disk, storage_errors
from cache_store.errors import BudgetExceeded, MissReason, SnapshotMiss, SnapshotMoved, StorageFailed
from cache_store.eviction import Candidate, Eviction, Evictor, Policy
from cache_store.fingerprint import Fingerprint
from cache_store.keyring import KeyRing
from cache_store.keys import EntryName, SnapshotKey
from cache_store.layout import KVLayout
from cache_store.lock import BuildLock
from cache_store.marks import Marks
from cache_store.quarantine import QuarantineNote, set_aside
from cache_store.reader import SnapshotReader
from cache_store.removal import discard_all
from cache_store.segments import WHOLE, Segments
from cache_store.slots import Counts
from cache_store.speeds import SpeedBook
from cache_store.stored import read_stored_manifest
from cache_store.subject import BuildSubject
from cache_store.sweep import QUARANTINE_S, SweepReport, sweep

T = TypeVar("T")
_TRIES = 5


def check_segments(wanted: Segments | None, stored: Segments, n_tokens: int) -> None:
    """Raises SnapshotMiss for a snapshot of `n_tokens` tokens that is not cut as `wanted` says; None takes any."""
    if wanted is not None and wanted.of_length(n_tokens) != stored:
        raise SnapshotMiss(MissReason.FINGERPRINT, "made with other segments")


class SnapshotStore:
    """Builds, opens, checks and removes snapshots below `root`.

    `budget_nbytes` bounds the bytes of all snapshots, builds and quarantined copies (None: no bound);
    `free_floor_nbytes` of the file system stay free. Both are enforced before anything is written: what costs least to
    lose is evicted (`cache_store.eviction`). `speeds` has what was measured of tiers and prefill, `marks` what is known
    of the use of snapshots.
    With `keys` everything is encrypted, and what is not, or with another key, is a miss (`key`).
    `disk`, `free` and `clock` are for tests. Raises StorageFailed when the directories cannot be made.
    """

    def __init__(
        self,
        root: Path,
        *,
        budget_nbytes: int | None = None,
        free_floor_nbytes: int = 0,
        disk: Disk | None = None,
        free: Callable[[Path], int] = free_nbytes,
        clock: Callable[[], float] = time.time,
        keys: KeyRing | None = None,
    ) -> None:
        ledger = Ledger(root, budget_nbytes, free_floor_nbytes, free)
        self._area = Area(root, disk or Disk(), ledger)
        self._clock = clock
        self.keys = keys
        self.speeds = SpeedBook(root / "speeds.json", clock)
        self.marks = Marks(self._area)
        self.evictor = Evictor(Policy(self._area, self.marks, self.speeds, clock, self._far), self._may_leave)
        with storage_errors("preparing the snapshot store"):
            self._area.prepare()

    def open(
        self,
        key: SnapshotKey,
        fingerprint: Fingerprint,
        layout: KVLayout,
        *,
        token_digest: str | None = None,
        context_digest: str = "",
        segments: Segments | None = None,
    ) -> SnapshotReader:
        """An open, identified snapshot whose records are checked as they are read.

        Raises SnapshotMiss with the reason, after a damaged snapshot was quarantined (also later, while it is
        read). `token_digest` None accepts any tokens, `segments` None any segmentation; a document with another one is
        a miss (`fingerprint`) and stays where it is until a build takes its place.
        """
        name = EntryName(key, fingerprint.digest)
        try:
            reader = self._reader(name, fingerprint, layout, token_digest, context_digest)
        except SnapshotMiss as miss:
            if miss.reason is MissReason.ABSENT:
                raise self._absence(name, fingerprint) from None
            raise
        try:
            check_segments(segments, reader.segments, reader.n_tokens)
        except SnapshotMiss:
            reader.close()
            raise
        self.used(key, fingerprint.digest)
        return reader

    def used(self, key: SnapshotKey, fingerprint_digest: str) -> None:
        """Count a use of a snapshot, also of one that is in memory already."""
        self.marks.used(EntryName(key, fingerprint_digest))

    def serve(self, fingerprint: Fingerprint, draft: Fingerprint | None = None) -> None:
        """Snapshots of this fingerprint can be used from now on, and those that the draft model with the other one
        reads; what others have made is the first to be evicted."""
        self.marks.serve(fingerprint.digest, "" if draft is None else draft.digest)

    def pin(self, key: SnapshotKey, pinned: bool) -> None:
        """Keep a key's snapshots on the disk, or no longer. Raises StorageFailed."""
        if self.marks.is_pinned(key) != pinned:
            self.marks.pin(key, pinned)

    def evict_for(self, nbytes: int | None, *, dry_run: bool = False) -> Eviction:
        """Free so many bytes by evicting what costs least to lose, all that may go for None. What stays, and why, is
        told too. Raises StorageFailed."""
        plan = self.evictor.plan(self.marks.served, nbytes)
        if dry_run:
            return plan
        return self.evictor.evict(self.marks.served, plan.nbytes if nbytes is None else nbytes)

    def is_evicted(self, key: SnapshotKey) -> bool:
        """Whether a key's snapshot was evicted from the disk and has not come back."""
        return self._area.tombstone(key).exists()

    def begin(
        self,
        key: SnapshotKey,
        fingerprint: Fingerprint,
        layout: KVLayout,
        token_ids: Sequence[int],
        *,
        context_digest: str = "",
        first_position: int = 0,
        segments: Segments = WHOLE,
        next_position: int | None = None,
        last_position: int | None = None,
        slot_counts: Counts | None = None,
    ) -> SnapshotBuilder:
        """A builder holding the one-writer lock; it goes on from a journal of the very same snapshot.

        `first_position` is the position of the first token (a turn's follow others), `segments` how a document is cut.
        A resident snapshot is one of rows: `token_ids` has one id for each, and `next_position` and `last_position` are
        given, which follow from the tokens for all others. One of slots is of rows too, as `cache_store.slots` says,
        with `slot_counts`. Where the budget is used up, others are evicted.
        Raises BuildLocked, BudgetExceeded (with the numbers, nothing written), StorageFailed, ValueError for no or
        impossible tokens, positions or counts, and for segments that are not whole blocks.
        """
        tokens = np.asarray(token_ids, dtype=np.int64)
        if not tokens.size or tokens.min() < 0 or tokens.max() >= 1 << 31:
            raise ValueError("a snapshot has at least one token, and token ids are 31-bit numbers")
        name = EntryName(key, fingerprint.digest)
        stored = tokens.astype("<i4")
        places = (first_position, segments, next_position, last_position, slot_counts)
        subject = BuildSubject(name, fingerprint, layout, stored, context_digest, *places)
        return self._with_room(name, lambda: self._builder(name, subject))

    def _builder(self, name: EntryName, subject: BuildSubject) -> SnapshotBuilder:
        with storage_errors("locking a snapshot"):
            lock = BuildLock(self._area.lock(name))
        try:
            return SnapshotBuilder(
                self._area,
                subject,
                lock,
                self._clock,
                before_publish=self._before_publish,
                after_publish=self._published,
                keys=self.keys,
            )
        except BaseException:
            lock.release()
            raise

    def quarantine(self, key: SnapshotKey, fingerprint_digest: str, reason: MissReason, detail: str) -> None:
        """Set a published snapshot aside; nothing happens when there is none."""
        note = QuarantineNote(str(reason), detail, self._clock())
        with storage_errors("quarantining a snapshot"):
            set_aside(self._area, EntryName(key, fingerprint_digest), note)

    def delete(self, key: SnapshotKey) -> Removed:
        """Remove a key's snapshots, builds and quarantined copies, and those of what was made from them (a document's
        resident rows and slots); a second call removes nothing.

        Open readers keep their bytes. A build that runs meanwhile fails when it publishes.
        """
        removed = Removed()
        with storage_errors("deleting a snapshot"):
            # What was made from a snapshot never outlives it.
            for one in (*key.made, key):
                removed += discard_all(self._area, one)
        return removed

    def evict(self, key: SnapshotKey) -> Removed:
        """As `delete`, but a later `open` says `evicted`."""
        removed = self.delete(key)
        with storage_errors("evicting a snapshot"):
            self._area.tombstone(key).touch(mode=0o600)
        return removed

    def usage(self) -> int:
        """Bytes of snapshots, builds and quarantined copies."""
        return self._area.ledger.used()

    def entries(self) -> list[inventory.EntryInfo]:
        """Everything the store holds."""
        return inventory.entries(self._area)

    def names(self) -> list[EntryName]:
        """Everything that is published."""
        return inventory.published(self._area)

    def fingerprint_of(self, name: EntryName) -> Fingerprint | None:
        """What a published snapshot was made with; None where that cannot be read."""
        with suppress(SnapshotMiss, StorageFailed, TypeError):
            return Fingerprint(**read_stored_manifest(self._area.snapshots, name).fingerprint)
        return None

    def verify(self, key: SnapshotKey | None = None) -> list[inventory.Verdict]:
        """Check every byte of the published snapshots (of one key). Quarantines nothing."""
        return [inventory.verify(self._area, name) for name in inventory.published(self._area, key)]

    def sweep(self, quarantine_s: float = QUARANTINE_S) -> SweepReport:
        """Put the store in order; for the start of a process. Quarantined copies older than `quarantine_s` go."""
        with storage_errors("sweeping the snapshot store"):
            return sweep(self._area, quarantine_s)

    def close(self) -> None:
        """End what works in the background."""

    def _with_room(self, name: EntryName, work: Callable[[], T]) -> T:
        """`work`, again and again as long as something can leave the disk for `name`."""
        ledger = self._area.ledger
        while True:
            try:
                return work()
            except BudgetExceeded as error:
                needed = error.needed_nbytes
                if ledger.is_too_large(needed):
                    raise
                with storage_errors("making room for a snapshot"):
                    if self.evictor.make_room(name, ledger.shortfall(needed)):
                        continue
                    # A process that was killed may have left too high a number behind.
                    self._area.recount()
                    if ledger.shortfall(needed):
                        raise ledger.refuse(needed) from None

    def _published(self, name: EntryName) -> None:
        self.marks.used(name)
        self._after_publish(name)

    def _far(self, name: EntryName, nbytes: int) -> tuple[str, float] | None:
        """The tier beyond the disk that would bring a snapshot back, and the seconds that takes."""
        return None

    def _may_leave(self, candidate: Candidate) -> bool:
        """Asked before a snapshot is evicted."""
        return True

    def _reader(
        self, name: EntryName, fingerprint: Fingerprint, layout: KVLayout, token_digest: str | None, context_digest: str
    ) -> SnapshotReader:
        for _ in range(_TRIES):
            try:
                return SnapshotReader(
                    self._area.snapshots,
                    name,
                    fingerprint=fingerprint,
                    layout=layout,
                    token_digest=token_digest,
                    context_digest=context_digest,
                    on_damage=self._damaged,
                    keys=self.keys,
                )
            except SnapshotMoved:
                continue
            except SnapshotMiss as miss:
                # What was not there a moment ago may have been published by now.
                if miss.reason is not MissReason.ABSENT or not os.path.lexists(self._area.published(name)):
                    raise
        raise SnapshotMoved(MissReason.ABSENT, "the snapshot does not stay long enough to be opened")

    def _before_publish(self, name: EntryName) -> None:
        """A snapshot is about to become visible. Raises StorageFailed."""

    def _after_publish(self, name: EntryName) -> None:
        """A snapshot has become visible."""

    def _damaged(self, reader: SnapshotReader, miss: SnapshotMiss) -> None:
        if miss.reason in (MissReason.ABSENT, MissReason.KEY):
            return
        note = QuarantineNote(str(miss.reason), miss.detail, self._clock())
        try:
            set_aside(self._area, reader.name, note, reader.directory_id)
        except OSError as error:
            # The miss stands either way; where nothing can be moved, the next open finds the damage again.
            miss.detail += f" (not quarantined: {error.strerror or error})"

    def _absence(self, name: EntryName, fingerprint: Fingerprint) -> SnapshotMiss:
        """Why there is no snapshot of this name: others of the key exist, it was evicted, or nothing."""
        others = [other for other in inventory.published(self._area, name.key) if other != name]
        if others:
            return SnapshotMiss(MissReason.FINGERPRINT, self._differences(others, fingerprint))
        if self._area.tombstone(name.key).exists():
            return SnapshotMiss(MissReason.EVICTED, "the snapshot was evicted to stay within the budget")
        return SnapshotMiss(MissReason.ABSENT, "there is no snapshot")

    def _differences(self, others: list[EntryName], fingerprint: Fingerprint) -> str:
        for other in others:
            if (stored := self.fingerprint_of(other)) is None:
                continue
            return f"the snapshot was made with another {', '.join(stored.differences(fingerprint))}"
        return "the snapshot was made with another fingerprint"
