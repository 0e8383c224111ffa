"""The directories of a store and what every part of it does with them: lock, reserve, move away.

<root>/snapshots/<owner>/documents/<id>/<fingerprint>/   published (and .../residents/..., .../turns/...)
<root>/building/<owner>~document~<id>~<fingerprint>/     being built, with a journal beside it
<root>/quarantine/<the same flat name>/                  damaged, with the reason beside it
<root>/evicted/<owner>~document~<id>                     tombstones
<root>/trash/                                            on its way out
<root>/uses/, pins/, served                              what eviction goes by (`cache_store.marks`)
<root>/locks/, store.lock, usage                         one writer per snapshot; the store's lock; bytes used
<root>/speeds.json, far/                                 measured speeds; what is to be done in tiers beyond the disk
"""

import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cache_store.budget import Ledger
from cache_store.disk import Disk, names_in, tree_size
from cache_store.keys import EntryName, SnapshotKey, flat_key
from cache_store.lock import exclusive

DIRECTORIES = ("snapshots", "building", "quarantine", "evicted", "trash", "locks", "uses", "pins")
JOURNAL_SUFFIX = ".journal"


@dataclass(frozen=True, slots=True)
class Removed:
    """What a removal took off the disk: files and their bytes."""

    objects: int = 0
    nbytes: int = 0

    def __add__(self, other: "Removed") -> "Removed":
        return Removed(self.objects + other.objects, self.nbytes + other.nbytes)


class Area:
    """A store's place on disk. Several processes may use one at the same time."""

    def __init__(self, root: Path, disk: Disk, ledger: Ledger) -> None:
        self.root = root
        self.disk = disk
        self.ledger = ledger
        self.snapshots = root / "snapshots"
        self.building = root / "building"
        self.quarantine = root / "quarantine"
        self.evicted = root / "evicted"
        self.trash = root / "trash"
        self.locks = root / "locks"
        self.uses = root / "uses"
        self.pins = root / "pins"

    def prepare(self) -> None:
        """Make the directories that are missing."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in DIRECTORIES:
            self.disk.make_dir(self.root / name)

    @contextmanager
    def guard(self) -> Generator[None]:
        """Hold the store's lock: for moments, never while data is read or written."""
        with exclusive(self.root / "store.lock"):
            yield

    def published(self, name: EntryName) -> Path:
        return self.snapshots.joinpath(*name.parts)

    def build(self, name: EntryName) -> Path:
        return self.building / name.flat

    def journal(self, name: EntryName) -> Path:
        return self.building / (name.flat + JOURNAL_SUFFIX)

    def lock(self, name: EntryName) -> Path:
        return self.locks / (name.flat + ".lock")

    def tombstone(self, key: SnapshotKey) -> Path:
        return self.evicted / flat_key(key)

    def quarantined(self) -> list[Path]:
        """Quarantined copies, the oldest first; their reasons are beside them."""
        paths = [self.quarantine / name for name in names_in(self.quarantine) if "." not in name]
        return sorted(paths, key=_changed_at)

    def discard(self, *paths: Path) -> Removed:
        """Take files or directories out of sight at once, then off the disk, and then off the account. Missing ones do
        not count."""
        doomed: list[tuple[Path, Removed]] = []
        with self.guard():
            for path in paths:
                size = Removed(*tree_size(path))
                if (target := self._move_to_trash(path)) is not None:
                    doomed.append((target, size))
        for target, size in doomed:
            self._destroy(target, size.nbytes)
        return sum((size for _, size in doomed), Removed())

    def recount(self) -> int:
        """Empty the trash, and set the account to what is on disk; the bytes in use."""
        for name in names_in(self.trash):
            self._empty(self.trash / name)
        with self.guard():
            for name in names_in(self.trash):
                self.disk.remove(self.trash / name)
            return self.ledger.recount()

    def _move_to_trash(self, path: Path) -> Path | None:
        target = self.trash / uuid.uuid4().hex
        try:
            self.disk.rename(path, target)
        except FileNotFoundError:
            return None
        self.disk.sync_dir(path.parent)
        return target

    def _destroy(self, path: Path, nbytes: int) -> None:
        """Who removes the last of it takes it off the account; a recount meanwhile has removed it and counted anew."""
        self._empty(path)
        with self.guard():
            is_ours = os.path.lexists(path)
            self.disk.remove(path)
            if is_ours:
                self.ledger.add(-nbytes)

    def _empty(self, path: Path) -> None:
        """Files are removed without the lock: those of a large snapshot take a while."""
        for name in names_in(path):
            self.disk.remove(path / name)


def _changed_at(path: Path) -> float:
    try:
        return path.lstat().st_ctime
    except OSError:
        return 0.0
