"""A tier in this process's memory: the fake that tests use, with the faults they ask for."""

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cache_store.area import Removed
from cache_store.keys import EntryName, SnapshotKey
from cache_store.tiers.errors import TierDown, TierRefused
from cache_store.tiers.tier import Arrived, TierEntry, generation_of, silent

_STEP_NBYTES = 1 << 10


@dataclass(slots=True)
class _Copy:
    manifest: bytes
    shards: list[bytes]
    changed_at: float = field(default_factory=time.time)

    @property
    def nbytes(self) -> int:
        return len(self.manifest) + sum(map(len, self.shards))


class MemoryTier:
    """A `BlobTier`. `down` makes every call raise TierDown; `budget_nbytes` bounds all copies together."""

    n_streams = 2

    def __init__(self, name: str = "memory", *, durable: bool = False, budget_nbytes: int | None = None) -> None:
        self.name = name
        self.durable = durable
        self.down = False
        self.n_calls = 0
        self.copies: dict[EntryName, _Copy] = {}
        self._budget_nbytes = budget_nbytes
        self._lock = threading.Lock()

    def manifest(self, name: EntryName) -> bytes | None:
        with self._lock:
            copy = self._called().get(name)
            return None if copy is None else copy.manifest

    def read(self, name: EntryName, generation: str, shard: int, memory: memoryview, arrived: Arrived = silent) -> int:
        with self._lock:
            copy = self._called().get(name)
            if copy is None or generation_of(copy.manifest) != generation:
                return 0
            data = copy.shards[shard]
        n = min(len(data), len(memory))
        for at in range(0, n, _STEP_NBYTES):
            end = min(at + _STEP_NBYTES, n)
            memory[at:end] = data[at:end]
            arrived(end)
        return min(len(data), len(memory) + 1)

    def write(self, name: EntryName, manifest: bytes, nbytes: int, shards: Iterable[memoryview]) -> None:
        self._called()
        if self._budget_nbytes is not None and self.used() + nbytes > self._budget_nbytes:
            raise TierRefused(f"{nbytes} bytes do not fit the {self.name} tier")
        copy = _Copy(manifest, [bytes(shard) for shard in shards])
        with self._lock:
            self._called()[name] = copy

    def touch(self, name: EntryName) -> None:
        self._called()

    def discard(self, name: EntryName) -> Removed:
        with self._lock:
            copy = self._called().pop(name, None)
        return Removed() if copy is None else Removed(1 + len(copy.shards), copy.nbytes)

    def remove(self, key: SnapshotKey) -> Removed:
        names = [name for name in list(self._called()) if name.key == key]
        return sum((self.discard(name) for name in names), Removed())

    def entries(self) -> Iterator[TierEntry]:
        for name, copy in list(self._called().items()):
            yield TierEntry(name, copy.nbytes, copy.changed_at)

    def used(self) -> int:
        return sum(copy.nbytes for copy in list(self._called().values()))

    def close(self) -> None:
        pass

    def _called(self) -> dict[EntryName, _Copy]:
        self.n_calls += 1
        if self.down:
            raise TierDown(f"the {self.name} tier does not answer")
        return self.copies
