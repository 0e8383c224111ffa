"""The files of the documents that are measured: on the disk, and copies of them in tiers beyond it."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cache_store.area import Area
from cache_store.budget import Ledger
from cache_store.disk import Disk
from cache_store.errors import MissReason, SnapshotMiss
from cache_store.keys import EntryName, SnapshotKey
from cache_store.tiers.bring import Bringer
from cache_store.tiers.copy import CopyPlan
from cache_store.tiers.send import send
from cache_store.tiers.tier import BlobTier

_READ_NBYTES = 8 << 20
_READERS = 4
"""Of a plain read: one alone does not keep a fast disk busy."""


def drop_page_cache(files: Iterable[Path]) -> None:
    """Ask the system to forget the files' pages, where it takes such wishes."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class SnapshotFiles:
    """The snapshots of `owner` below an engine's store, of one fingerprint. Blocking; reading one raises SnapshotMiss
    when it is not there, or no longer: within its budget the store evicts one for another."""

    def __init__(self, root: Path, owner: str, fingerprint_digest: str) -> None:
        self.owner = owner
        self.area = Area(root, Disk(), Ledger(root, None, 0))
        self._digest = fingerprint_digest

    def entry(self, name: str) -> EntryName:
        return EntryName(SnapshotKey(self.owner, "document", name), self._digest)

    def discard(self, name: str) -> None:
        """Take a document's snapshot off the disk."""
        self.area.discard(self.area.published(self.entry(name)))

    def forget_pages(self, name: str) -> None:
        """A document's files: the next read comes from the disk."""
        with _misses():
            drop_page_cache(self._paths(name))

    def read_gbps(self, name: str) -> float:
        """GB/s of plainly reading a document's files from the disk, with nothing checked and nothing kept."""
        self.forget_pages(name)
        with _misses():
            parts = [(path, at) for path in self._paths(name) for at in range(0, path.stat().st_size, _READ_NBYTES)]
            return _gbps(_READERS, [lambda part=part: _read_part(*part) for part in parts])

    def _paths(self, name: str) -> list[Path]:
        return sorted(path for path in self.area.published(self.entry(name)).iterdir() if path.is_file())


class FarCopies:
    """Copies of these snapshots in one tier beyond the disk. Blocking; raises TierDown, TierRefused, SnapshotMiss."""

    def __init__(self, files: SnapshotFiles, tier: BlobTier) -> None:
        self.tier = tier
        self._files = files
        self._sent: list[EntryName] = []

    def send(self, name: str) -> None:
        entry = self._files.entry(name)
        self._sent.append(entry)
        send(self._files.area, entry, self.tier)

    def bring(self, name: str) -> float:
        """Bring a document to the disk, checked, as the engine does for a question about it; the seconds it took."""
        self._files.discard(name)
        started = time.perf_counter()
        Bringer(self._files.area, self.tier, self._plan(name), lambda: False).run()
        return time.perf_counter() - started

    def read_gbps(self, name: str) -> float:
        """GB/s of plainly getting a document's bytes, with nothing checked and nothing written."""
        plan = self._plan(name)

        def read(index: int) -> int:
            memory = np.empty(plan.shards[index].nbytes, np.uint8).data
            return self.tier.read(plan.name, plan.generation, index, memory)

        return _gbps(self.tier.n_streams, [lambda i=i: read(i) for i in range(len(plan.shards))])

    def remove_all(self) -> None:
        """Take away what was sent."""
        while self._sent:
            self.tier.remove(self._sent[-1].key)
            self._sent.pop()

    def _plan(self, name: str) -> CopyPlan:
        entry = self._files.entry(name)
        data = self.tier.manifest(entry)
        if data is None:
            raise SnapshotMiss(MissReason.ABSENT, f"the {self.tier.name} tier has lost the copy that was sent")
        return CopyPlan(entry, data)


@contextmanager
def _misses() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        detail = "the document's files are not on the disk: was there room for it (PREREAD_SNAPSHOT_BUDGET_BYTES)?"
        raise SnapshotMiss(MissReason.ABSENT, detail) from None


def _gbps(n_threads: int, reads: list[Callable[[], int]]) -> float:
    started = time.perf_counter()
    if len(reads) == 1:  # threads would take longer than it does
        nbytes = reads[0]()
    else:
        with ThreadPoolExecutor(n_threads) as pool:
            nbytes = sum(pool.map(lambda read: read(), reads))
    return nbytes / max(time.perf_counter() - started, 1e-9) / 1e9


def _read_part(path: Path, at: int) -> int:
    with path.open("rb", buffering=0) as file:
        file.seek(at)
        return len(file.read(_READ_NBYTES))
