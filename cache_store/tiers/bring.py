"""Brings a copy from a tier to the local disk: several shards at once, each checked in memory before it is written.

The copy is as good as one that was built here, but for one thing: it is not forced to the disk before it is visible.
What a loss of power takes from it shows when it is read, and it is brought again.
"""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from cache_store.area import Area
from cache_store.disk import storage_errors
from cache_store.errors import MissReason, SnapshotMiss
from cache_store.lock import BuildLock
from cache_store.placement import move_into_place, reserve, write_manifest
from cache_store.shards import Shard
from cache_store.tiers.copy import CopyPlan, ShardCheck
from cache_store.tiers.tier import BlobTier

_WRITE_NBYTES = 512 << 10
"""At least so much is written at once: what was just checked is in the processor's cache still."""


class Bringer:
    """One copy on its way. `is_removed` says whether the snapshot is being deleted meanwhile."""

    def __init__(self, area: Area, tier: BlobTier, plan: CopyPlan, is_removed: Callable[[], bool]) -> None:
        self._area = area
        self._tier = tier
        self._plan = plan
        self._is_removed = is_removed
        self._stop = threading.Event()

    def run(self) -> None:
        """Publish the copy, unless a snapshot of its name is there already.

        Raises SnapshotMiss (a shard is damaged or gone), TierDown, BuildLocked, BudgetExceeded, StorageFailed; nothing
        is visible then.
        """
        area, name = self._area, self._plan.name
        with storage_errors("bringing a snapshot"):
            lock = BuildLock(area.lock(name))
            try:
                if not os.path.lexists(area.published(name)):
                    self._replace_build(area.build(name))
            finally:
                lock.release()

    def _replace_build(self, directory: Path) -> None:
        area, plan = self._area, self._plan
        area.discard(directory)
        area.disk.remove(area.journal(plan.name))
        needed = plan.nbytes + len(plan.data)
        fds = reserve(area, directory, plan.shards, needed_nbytes=needed, manifest_nbytes=len(plan.data))
        try:
            # From here on a deletion takes the directory away: before, it has left its note.
            if self._is_removed():
                raise SnapshotMiss(MissReason.ABSENT, "the snapshot is being deleted")
            self._fetch(fds)
            plan.check_tokens()
            write_manifest(area, directory, plan.data, durable=False)
            move_into_place(area, plan.name, directory)
        except BaseException:
            area.discard(directory)
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def _fetch(self, fds: list[int]) -> None:
        plan, n = self._plan, min(self._tier.n_streams, len(self._plan.shards))
        buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(n):
            buffers.put(np.empty(plan.largest_nbytes, np.uint8).data)
        if n == 1:
            for shard in plan.shards:
                self._fetch_one(shard, fds[shard.index], buffers)
            return
        with ThreadPoolExecutor(n, "snapshot-bring") as pool:
            futures = [pool.submit(self._fetch_one, shard, fds[shard.index], buffers) for shard in plan.shards]
            for future in futures:
                future.result()

    def _fetch_one(self, shard: Shard, fd: int, buffers: "queue.SimpleQueue[memoryview]") -> None:
        if self._stop.is_set():
            return
        buffer = buffers.get()
        try:
            memory = buffer[: shard.nbytes]
            self._checked(shard, fd, memory)
        except BaseException:
            self._stop.set()
            raise
        finally:
            buffers.put(buffer)

    def _checked(self, shard: Shard, fd: int, memory: memoryview) -> None:
        """Read a shard, check and write it; once more when it fails, since the fault may be the way's."""
        with suppress(SnapshotMiss):
            return self._copy(shard, fd, memory)
        return self._copy(shard, fd, memory)

    def _copy(self, shard: Shard, fd: int, memory: memoryview) -> None:
        check, written = ShardCheck(self._plan, shard, memory), 0

        def arrived(n: int) -> None:
            nonlocal written
            checked = check.up_to(n)
            if checked - written >= _WRITE_NBYTES or (n == len(memory) and checked > written):
                with storage_errors("bringing a snapshot"):
                    self._area.disk.write_at(fd, memory[written:checked], written)
                written = checked

        n = self._tier.read(self._plan.name, self._plan.generation, shard.index, memory, arrived)
        if n != len(memory):
            raise SnapshotMiss(MissReason.TRUNCATED, f"{shard.file_name} has {n} of {len(memory)} bytes")
        arrived(n)
