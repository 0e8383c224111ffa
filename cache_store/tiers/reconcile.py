"""Brings the disk, the tiers beyond it and the rows of a database together again, for an operator."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cache_store.errors import SnapshotMiss
from cache_store.keys import EntryName, SnapshotKey
from cache_store.store import SnapshotStore
from cache_store.stored import decode_manifest
from cache_store.tiers.errors import TierDown
from cache_store.tiers.store import TieredStore
from cache_store.tiers.tier import BlobTier, TierEntry

YOUNG_S = 3600.0
"""What is younger may belong to a build or an answer whose row is yet to come."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """Bytes in a tier that nothing refers to; `why`: `no document`, `no turn`, `incomplete`, `left over`."""

    tier: str
    what: str
    nbytes: int
    why: str


@dataclass(slots=True)
class Reconciled:
    """What was removed, or would be; how many snapshots were sent to a tier, and how many are still to be sent to, or
    removed from, one; tiers that did not answer, and why."""

    orphans: list[Orphan] = field(default_factory=list[Orphan])
    n_sent: int = 0
    n_to_send: int = 0
    n_to_remove: int = 0
    down: dict[str, str] = field(default_factory=dict[str, str])


def reconcile(store: SnapshotStore, is_known: Callable[[SnapshotKey], bool], *, dry_run: bool) -> Reconciled:
    """Remove what belongs to no row, send what a tier lacks, finish removals. `is_known` says whether a row refers to a
    key. Others may use the store meanwhile. Raises StorageFailed."""
    report = Reconciled()
    report.orphans += _of_disk(store, is_known, dry_run)
    if isinstance(store, TieredStore):
        if not dry_run:
            store.finish_removals()
        for tier in store.tiers:
            try:
                _of_tier(store, tier, is_known, report, dry_run)
            except TierDown as error:
                report.down[tier.name] = str(error)
        if not dry_run:
            n_noted = store.n_to_send
            store.uploader.send_noted()
            report.n_sent = max(0, n_noted - store.n_to_send)  # a server that runs may note more meanwhile
        report.n_to_send += store.n_to_send
        report.n_to_remove = store.n_to_remove
    return report


def _of_disk(store: SnapshotStore, is_known: Callable[[SnapshotKey], bool], dry_run: bool) -> Iterator[Orphan]:
    if not dry_run:
        swept = store.sweep()
        if swept.removed.nbytes:
            yield Orphan("disk", ", ".join(swept.removed_names), swept.removed.nbytes, "left over")
    for entry in store.entries():
        key = entry.name.key
        if not is_known(key) and entry.state == "published" and _is_old(entry.created_at):
            if not dry_run:
                store.delete(key)
            yield Orphan("disk", key.text, entry.nbytes, _why(key))


def _of_tier(
    store: TieredStore, tier: BlobTier, is_known: Callable[[SnapshotKey], bool], report: Reconciled, dry_run: bool
) -> None:
    held: set[EntryName] = set()
    for entry in list(tier.entries()):
        why = "" if entry.complete else "incomplete"
        if not is_known(entry.name.key):
            why = _why(entry.name.key)
        if not why or not _is_old(entry.changed_at or _created_at(tier, entry)):
            held |= {entry.name} if entry.complete else set()
            continue
        if not dry_run:
            tier.discard(entry.name)
        report.orphans.append(Orphan(tier.name, entry.name.key.text, entry.nbytes, why))
    n_missing = store.note_missing(tier, held, dry_run=dry_run)
    if dry_run:
        report.n_to_send += n_missing


def _created_at(tier: BlobTier, entry: TierEntry) -> float | None:
    data = tier.manifest(entry.name)
    try:
        return None if data is None else decode_manifest(data).created_at
    except SnapshotMiss:
        return 0.0


def _is_old(at: float | None) -> bool:
    return at is not None and time.time() - at > YOUNG_S


def _why(key: SnapshotKey) -> str:
    return "no turn" if key.kind == "turn" else "no document"
