"""Keeps a dead tier from being asked again and again: it costs one time-out an interval, not one a question."""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager

from cache_store.area import Removed
from cache_store.keys import EntryName, SnapshotKey
from cache_store.tiers.errors import TierDown
from cache_store.tiers.tier import Arrived, BlobTier, TierEntry, silent

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0


class Breaker:
    """Closed while calls succeed. One that raises TierDown opens it: for a pause, which doubles while the tier stays
    down, calls raise TierDown at once. Then a single call may try; others go on being refused until it has ended."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = FIRST_PAUSE_S
        self._closed_again_at: float | None = None
        self._trying = False

    @property
    def is_open(self) -> bool:
        return self._closed_again_at is not None

    @contextmanager
    def call(self) -> Generator[None]:
        self._enter()
        try:
            yield
        except TierDown:
            self._failed()
            raise
        except BaseException:
            # The tier answered, whatever came of it.
            self._answered()
            raise
        self._answered()

    def _enter(self) -> None:
        with self._lock:
            if self._closed_again_at is None:
                return
            if self._trying or self._clock() < self._closed_again_at:
                raise TierDown(f"{self._what} did not answer lately; it is asked again soon")
            self._trying = True

    def _failed(self) -> None:
        with self._lock:
            self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S) if self._trying else FIRST_PAUSE_S
            self._trying = False
            self._closed_again_at = self._clock() + self._pause_s

    def _answered(self) -> None:
        with self._lock:
            self._trying = False
            self._closed_again_at = None


class GuardedTier:
    """A `BlobTier` behind a breaker."""

    def __init__(self, tier: BlobTier, clock: Callable[[], float] = time.monotonic) -> None:
        self._tier = tier
        self.breaker = Breaker(f"the {tier.name} tier", clock)
        self.name = tier.name
        self.durable = tier.durable
        self.n_streams = tier.n_streams

    def manifest(self, name: EntryName) -> bytes | None:
        with self.breaker.call():
            return self._tier.manifest(name)

    def read(self, name: EntryName, generation: str, shard: int, memory: memoryview, arrived: Arrived = silent) -> int:
        with self.breaker.call():
            return self._tier.read(name, generation, shard, memory, arrived)

    def write(self, name: EntryName, manifest: bytes, nbytes: int, shards: Iterable[memoryview]) -> None:
        with self.breaker.call():
            self._tier.write(name, manifest, nbytes, shards)

    def touch(self, name: EntryName) -> None:
        with self.breaker.call():
            self._tier.touch(name)

    def discard(self, name: EntryName) -> Removed:
        with self.breaker.call():
            return self._tier.discard(name)

    def remove(self, key: SnapshotKey) -> Removed:
        with self.breaker.call():
            return self._tier.remove(key)

    def entries(self) -> Iterator[TierEntry]:
        with self.breaker.call():
            yield from self._tier.entries()

    def used(self) -> int:
        with self.breaker.call():
            return self._tier.used()

    def close(self) -> None:
        self._tier.close()
