"""The disk tier with others beyond it: snapshots are sent there when they are published, and come back when asked for.

Written through: the disk first, then the durable tier, then the caches, the last two in the background. Read from the
nearest: what is not on the disk is brought there, checked, and opened as ever, so that nobody who reads knows of tiers.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cache_store import inventory
from cache_store.area import Removed
from cache_store.disk import storage_errors
from cache_store.errors import BudgetExceeded, BuildLocked, CacheStoreError, MissReason, SnapshotMiss, StorageFailed
from cache_store.eviction import NOMINAL_BYTES_PER_S, Candidate
from cache_store.fingerprint import Fingerprint
from cache_store.keys import EntryName, SnapshotKey
from cache_store.layout import KVLayout
from cache_store.reader import SnapshotReader
from cache_store.sealing import opener_of
from cache_store.segments import Segments
from cache_store.store import SnapshotStore, check_segments
from cache_store.sweep import QUARANTINE_S, SweepReport
from cache_store.tiers.bring import Bringer
from cache_store.tiers.copy import CopyPlan
from cache_store.tiers.errors import TierDown, TierRefused
from cache_store.tiers.notes import Notes
from cache_store.tiers.send import local_manifest
from cache_store.tiers.tier import BlobTier, TierEntry
from cache_store.tiers.uploader import RETRY_S, Uploader

T = TypeVar("T")
log = logging.getLogger(__name__)

BRING_WAIT_S = 30.0
"""How long one who asks waits for another who brings, or builds, the same snapshot."""
_POLL_S = 0.02
_CLOSE_S = 2.0


class TieredStore(SnapshotStore):
    """A `SnapshotStore` with `tiers` beyond the disk, the nearest first.

    `uploads`: whether this process sends what is published; one of all that share a directory should, the engine's.
    Other arguments are those of `SnapshotStore`.
    """

    def __init__(
        self, root: Path, tiers: Sequence[BlobTier], *, uploads: bool = True, retry_s: float = RETRY_S, **disk: Any
    ) -> None:
        super().__init__(root, **disk)
        self.tiers = tuple(tiers)
        self.root = root
        self._notes = Notes(root)
        self._deleting: Counter[SnapshotKey] = Counter()
        durable_first = sorted(self.tiers, key=lambda tier: not tier.durable)
        self.uploader = Uploader(self._area, self._notes, durable_first, self._damaged_on_disk, retry_s)
        self._uploads = uploads
        if uploads:
            self.uploader.start()

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
        """As `SnapshotStore.open`; what is not on the disk is brought there first, from the nearest tier that has it,
        unless computing it is faster. `source` of the reader says where it came from."""
        name = EntryName(key, fingerprint.digest)
        open_here = partial(
            super().open,
            key,
            fingerprint,
            layout,
            token_digest=token_digest,
            context_digest=context_digest,
            segments=segments,
        )

        def check(plan: CopyPlan) -> None:
            plan.matches(fingerprint, layout, token_digest, context_digest)
            opener_of(plan.manifest, self.keys)
            check_segments(segments, plan.manifest.segments, plan.manifest.n_tokens)

        try:
            reader = open_here()
        except SnapshotMiss as miss:
            source = self._bring(name, miss, check)
            if source is None:
                raise
            reader = open_here()
            reader.source = source
        return reader

    def quarantine(self, key: SnapshotKey, fingerprint_digest: str, reason: MissReason, detail: str) -> None:
        """As `SnapshotStore.quarantine`; the copies elsewhere are of the same bytes and go."""
        super().quarantine(key, fingerprint_digest, reason, detail)
        self._notes.forget(key)
        for tier in self.tiers:
            self._remove_from(tier, key)

    def delete_by_tier(self, key: SnapshotKey) -> dict[str, Removed]:
        """Remove a key, and what was made from it, from the disk and every tier; what each had. What a tier that is
        down still has is removed when it is back (`finish_removals`), and is not used before."""
        keys = (*key.made, key)
        self._deleting.update(keys)
        try:
            for one in keys:
                for tier in self.tiers:
                    self._notes.ask_removal(one, tier.name)
                self._notes.forget(one)
            removed = {"disk": super().delete(key)}
            for tier in self.tiers:
                removed[tier.name] = sum((self._remove_from(tier, one) for one in keys), Removed())
            return removed
        finally:
            self._deleting.subtract(keys)

    def delete(self, key: SnapshotKey) -> Removed:
        """As `delete_by_tier`, all together."""
        return sum(self.delete_by_tier(key).values(), Removed())

    def evict(self, key: SnapshotKey) -> Removed:
        """Remove a key from the disk alone: what a tier has comes back when it is asked for."""
        removed = super().delete(key)
        with storage_errors("evicting a snapshot"):
            self._area.tombstone(key).touch(mode=0o600)
        return removed

    def finish_removals(self) -> int:
        """Remove what was deleted while a tier was down; how many removals are still to be done."""
        tiers = {tier.name: tier for tier in self.tiers}
        for key, tier_name in self._notes.removals():
            # One that is under way counts what it removes, for its receipt.
            if tier_name in tiers and self._deleting[key] <= 0:
                self._remove_from(tiers[tier_name], key)
        return len(self._notes.removals())

    def sweep(self, quarantine_s: float = QUARANTINE_S) -> SweepReport:
        """As `SnapshotStore.sweep`; unfinished notes go too."""
        report = super().sweep(quarantine_s)
        with storage_errors("sweeping the notes of the tiers"):
            report.removed_names += self._notes.sweep()
        return report

    def places(self, key: SnapshotKey) -> dict[str, str]:
        """Where a key's snapshots are: the tier, and `ready` or `pending`. By notes alone: no tier is asked."""
        held = {"disk": "ready"} if inventory.published(self._area, key) else {}
        return held | self.far_places(key)

    def far_places(self, key: SnapshotKey) -> dict[str, str]:
        """As `places`, without the disk."""
        known = self._notes.of_key(key)
        return {tier.name: known[tier.name] for tier in self.tiers if tier.name in known}

    def known_at(self, key: SnapshotKey) -> dict[str, float]:
        """When each tier that is `ready` in `far_places` was last seen to have the copy (Unix time)."""
        return self._notes.known_at(key)

    @property
    def n_to_send(self) -> int:
        """Snapshots that some tier is still to get."""
        return len(self._notes.uploads())

    @property
    def n_to_remove(self) -> int:
        """Removals that are still to be done in some tier."""
        return len(self._notes.removals())

    def note_missing(self, tier: BlobTier, held: Container[EntryName], *, dry_run: bool = False) -> int:
        """Compare what a tier holds with the notes: a copy that it has lost is not counted on any more, and what a
        durable one has never got is noted to be sent; how many of these there are."""
        n_missing = 0
        for name in inventory.published(self._area):
            if name in held:
                continue
            n_missing += tier.durable
            if not dry_run:
                self._notes.not_placed(name, tier.name)
                if tier.durable:
                    self._notes.ask_upload(name, dict.fromkeys([*self._notes.wanting(name), tier.name]))
        return n_missing

    def far_entries(self) -> Iterator[tuple[BlobTier, TierEntry]]:
        """What the tiers beyond the disk hold; nothing of those that are down."""
        for tier in self.tiers:
            try:
                for entry in tier.entries():
                    yield tier, entry
            except TierDown as error:
                log.warning("%s", error)

    def close(self, wait_s: float = _CLOSE_S) -> None:
        """Stop sending; what is not sent yet is at the next start."""
        self.uploader.close(wait_s)
        for tier in self.tiers:
            tier.close()

    def _before_publish(self, name: EntryName) -> None:
        self._notes.ask_upload(name, [tier.name for tier in self.tiers])

    def _after_publish(self, name: EntryName) -> None:
        if self._uploads:
            self.uploader.add(name)

    def _bring(self, name: EntryName, miss: SnapshotMiss, check: Callable[[CopyPlan], None]) -> str | None:
        """The tier that a snapshot came from; None, with the reasons in the miss, when it came from none."""
        if os.path.lexists(self._area.published(name)):
            return None  # there, and another than what is asked for
        for tier in self.tiers:
            try:
                if self._notes.is_removed(name.key, tier.name):
                    continue
                if self._bring_from(tier, name, check):
                    return tier.name
            except SnapshotMiss as found:
                if found.reason is MissReason.KEY:
                    miss.reason = found.reason
                miss.detail += f"; {tier.name}: {found.detail}"
            except (TierDown, TierRefused, BuildLocked, BudgetExceeded, StorageFailed) as error:
                miss.detail += f"; {tier.name}: {error}"
        return None

    def _bring_from(self, tier: BlobTier, name: EntryName, check: Callable[[CopyPlan], None]) -> bool:
        data = tier.manifest(name)
        if data is None:
            self._notes.not_placed(name, tier.name)  # it may have been emptied since it was noted
            return False
        started = time.monotonic()
        try:
            plan = CopyPlan(name, data)
        except SnapshotMiss as miss:
            self._damaged_in(tier, name, miss)
            raise
        check(plan)
        if name.key.source is None and not self.speeds.pays(tier.name, plan.nbytes, plan.manifest.n_tokens):
            raise SnapshotMiss(MissReason.ABSENT, "computing it is faster than bringing it")
        bringer = Bringer(self._area, tier, plan, lambda: self._notes.is_removed(name.key, tier.name))
        try:
            self._with_room(name, lambda: self._patiently(bringer, name))
        except SnapshotMiss as miss:
            self._damaged_in(tier, name, miss, plan.data)
            raise
        self.speeds.record_bytes(tier.name, plan.nbytes, time.monotonic() - started)
        self._promote(tier, name)
        return True

    def _patiently(self, bringer: Bringer, name: EntryName) -> None:
        """Bring, or wait for somebody else who does."""
        until = time.monotonic() + BRING_WAIT_S
        while True:
            try:
                return bringer.run()
            except BuildLocked:
                # A build that computes goes on for longer than anybody should wait; it has a journal.
                if time.monotonic() > until or self._area.journal(name).exists():
                    raise
            time.sleep(_POLL_S)

    def _promote(self, source: BlobTier, name: EntryName) -> None:
        """Used once, it may be again: nearer tiers get it, and the one it came from knows."""
        try:
            source.touch(name)
            self._notes.uploaded(name, source.name)
            nearer = [tier.name for tier in self.tiers[: self.tiers.index(source)]]
            if nearer and self._uploads:
                self._notes.ask_upload(name, nearer)
                self.uploader.add(name)
        except CacheStoreError as error:
            log.warning("a snapshot that was used is not promoted: %s", error)

    def _damaged_in(self, tier: BlobTier, name: EntryName, miss: SnapshotMiss, data: bytes | None = None) -> None:
        """Take a damaged copy out of a tier, unless another has taken its place meanwhile."""
        if miss.reason in (MissReason.ABSENT, MissReason.VERSION):
            return
        log.warning("the copy of %s in the %s tier cannot be used: %s", name.flat, tier.name, miss)
        try:
            if data is None or tier.manifest(name) == data:
                tier.discard(name)
                self._notes.not_placed(name, tier.name)
        except (TierDown, TierRefused, StorageFailed) as error:
            log.warning("a damaged copy stays in the %s tier: %s", tier.name, error)

    def _damaged_on_disk(self, name: EntryName, miss: SnapshotMiss) -> None:
        log.warning("%s is not sent to the tiers: %s", name.flat, miss)
        SnapshotStore.quarantine(self, name.key, name.fingerprint_digest, miss.reason, miss.detail)

    def _remove_from(self, tier: BlobTier, key: SnapshotKey) -> Removed:
        """What a tier had; noted when it is down."""
        try:
            removed = tier.remove(key)
        except (TierDown, TierRefused) as error:
            self._notes.ask_removal(key, tier.name)
            log.warning("%s is removed from the %s tier when that is back: %s", key.text, tier.name, error)
            return Removed()
        self._notes.removed(key, tier.name)
        return removed

    def _far(self, name: EntryName, nbytes: int) -> tuple[str, float] | None:
        """The nearest tier that is known to have it; a durable one before the others, which forget."""
        placed = set(self._notes.placed(name))
        held = [tier for tier in self.tiers if tier.name in placed]
        if not held:
            return None
        tier = min(held, key=lambda tier: not tier.durable)
        seconds = self.speeds.restore_s(tier.name, nbytes)
        return tier.name, nbytes / NOMINAL_BYTES_PER_S if seconds is None else seconds

    def _may_leave(self, candidate: Candidate) -> bool:
        """A document that is on its way to a durable tier gets there first. What a tier has lost is counted on no
        longer: such a snapshot is worth more than was thought, and stays this time."""
        name = candidate.name
        for tier in self.tiers:
            if tier.durable and name.key.kind == "document" and tier.name in self._notes.wanting(name):
                self.uploader.send(name)
            if tier.name == candidate.copy and self._has_lost(tier, name):
                self._notes.not_placed(name, tier.name)
                return False
        return True

    def _has_lost(self, tier: BlobTier, name: EntryName) -> bool:
        """Whether a tier has for sure no equal copy."""
        try:
            there, here = tier.manifest(name), local_manifest(self._area, name)
            return there is None or (here is not None and not CopyPlan(name, here).same_as(there))
        except (TierDown, SnapshotMiss):
            return False
