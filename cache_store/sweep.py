"""Puts a store in order at start: what a killed process left goes, unfinished builds of documents stay."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from cache_store.area import JOURNAL_SUFFIX, Area, Removed
from cache_store.disk import names_in
from cache_store.errors import BuildLocked
from cache_store.inventory import held_keys
from cache_store.keys import EntryName, parse_flat
from cache_store.lock import BuildLock
from cache_store.marks import Marks
from cache_store.removal import discard_all

QUARANTINE_S = 7 * 24 * 3600.0
"""How long a damaged snapshot is kept to be looked at."""


@dataclass(slots=True)
class SweepReport:
    """What a sweep removed, which unfinished builds it kept, and the bytes in use after it."""

    removed: Removed = field(default_factory=Removed)
    removed_names: list[str] = field(default_factory=list[str])
    kept_builds: list[EntryName] = field(default_factory=list[EntryName])
    used_nbytes: int = 0


def sweep(area: Area, quarantine_s: float) -> SweepReport:
    """Remove leftovers and abandoned locks, count the bytes anew. Other processes may use the store."""
    report = SweepReport()
    for flat in sorted({name.partition(".")[0] for name in names_in(area.building)}):
        _sweep_build(area, flat, report)
    for path in area.quarantined():
        if time.time() - path.lstat().st_ctime > quarantine_s:
            area.disk.remove(path.with_suffix(".json"))
            _discard(area, path, report)
    _sweep_orphans(area, report)
    report.removed_names += names_in(area.trash)
    _sweep_locks(area)
    Marks(area).sweep()
    with area.guard():
        _remove_empty(area)
    report.used_nbytes = area.recount()
    return report


def _discard(area: Area, path: Path, report: SweepReport) -> None:
    removed = area.discard(path)
    if removed.objects:
        report.removed += removed
        report.removed_names.append(path.name)


def _sweep_build(area: Area, flat: str, report: SweepReport) -> None:
    """Keep a build that its job can go on with; remove what is half of one, or already published."""
    directory, journal = area.building / flat, area.building / (flat + JOURNAL_SUFFIX)
    name = parse_flat(flat)
    if name is None:
        area.disk.remove(journal)
        _discard(area, directory, report)
        return
    try:
        lock = BuildLock(area.lock(name))
    except BuildLocked:
        return
    try:
        whole = directory.is_dir() and journal.is_file()
        if whole and not os.path.lexists(area.published(name)):
            report.kept_builds.append(name)
            return
        area.disk.remove(journal)
        _discard(area, directory, report)
    finally:
        lock.release()


def _sweep_orphans(area: Area, report: SweepReport) -> None:
    """What was made from a snapshot goes when nothing of that snapshot is left, in whatever state."""
    with area.guard():
        held = held_keys(area)
    for key in sorted(key for key in held if key.source is not None and key.source not in held):
        report.removed += discard_all(area, key)
        report.removed_names.append(key.text)


def _sweep_locks(area: Area) -> None:
    """A lock nobody holds is left by a killed process; taking and releasing it removes its file."""
    for file_name in names_in(area.locks):
        name = parse_flat(file_name)
        if name is None:
            area.disk.remove(area.locks / file_name)
            continue
        try:
            BuildLock(area.lock(name)).release()
        except BuildLocked:
            continue


def _remove_empty(area: Area) -> None:
    """Remove empty directories of owners, kinds and ids."""
    for owner in names_in(area.snapshots):
        for kind in names_in(area.snapshots / owner):
            for snapshot_id in names_in(area.snapshots / owner / kind):
                area.disk.remove_empty(area.snapshots / owner / kind / snapshot_id)
            area.disk.remove_empty(area.snapshots / owner / kind)
        area.disk.remove_empty(area.snapshots / owner)
