"""Sends finished snapshots to the tiers, in a thread of its own: nobody who waits for a snapshot waits for that.

What is to be sent is a note on disk, so that nothing is forgotten when a process ends or a tier is down: it is tried
again until the tier has it, or refuses it, or the snapshot is gone.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from cache_store.area import Area
from cache_store.errors import CacheStoreError, MissReason, SnapshotMiss
from cache_store.keys import EntryName
from cache_store.tiers.errors import TierDown, TierRefused
from cache_store.tiers.notes import Notes
from cache_store.tiers.send import local_manifest, send
from cache_store.tiers.tier import BlobTier

log = logging.getLogger(__name__)

RETRY_S = 15.0


class Uploader:
    """`tiers` in the order in which they get a snapshot: the durable first. `on_damage` is told of a snapshot on disk
    that cannot be sent for its damage."""

    def __init__(
        self,
        area: Area,
        notes: Notes,
        tiers: Sequence[BlobTier],
        on_damage: Callable[[EntryName, SnapshotMiss], None],
        retry_s: float = RETRY_S,
    ) -> None:
        self._area = area
        self._notes = notes
        self._tiers = tiers
        self._on_damage = on_damage
        self._retry_s = retry_s
        self._queue: queue.SimpleQueue[EntryName | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._sending = threading.Lock()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="snapshot-upload", daemon=True)
        self._thread.start()

    def add(self, name: EntryName) -> None:
        """Send what has just been published, and noted."""
        self._queue.put(name)

    def close(self, wait_s: float) -> None:
        """Let the thread end what is in hand, for a while at most; the rest is sent at the next start."""
        self._closed.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(wait_s)

    def send_noted(self) -> int:
        """Send everything that is noted, now; how many snapshots are still to be sent."""
        for name in self._notes.uploads():
            self.send(name)
        return len(self._notes.uploads())

    def send(self, name: EntryName) -> None:
        """To each tier that has not got it. What fails stays noted."""
        with self._sending:
            for tier in self._tiers:
                if tier.name in self._notes.wanting(name) and not self._closed.is_set():
                    self._send(name, tier)

    def _run(self) -> None:
        names: list[EntryName] = self._notes.uploads()
        while not self._closed.is_set():
            for name in names:
                if self._closed.is_set():
                    return
                try:
                    self.send(name)
                except Exception:
                    log.exception("a snapshot was not sent to a tier")
            try:
                name = self._queue.get(timeout=self._retry_s)
                names = [] if name is None else [name]
            except queue.Empty:
                names = self._notes.uploads()

    def _send(self, name: EntryName, tier: BlobTier) -> None:
        try:
            if self._notes.is_removed(name.key, tier.name):
                tier.remove(name.key)
                self._notes.removed(name.key, tier.name)
            before = local_manifest(self._area, name)
            send(self._area, name, tier)
            if local_manifest(self._area, name) != before:
                self._take_back(name, tier)
                return
            self._notes.uploaded(name, tier.name)
        except TierDown as error:
            log.warning("a snapshot is not in the %s tier yet: %s", tier.name, error)
        except TierRefused as error:
            log.warning("a snapshot is not kept in the %s tier: %s", tier.name, error)
            self._notes.uploaded(name, tier.name, placed=False)
        except SnapshotMiss as miss:
            self._notes.forget_upload(name)
            if miss.reason is not MissReason.ABSENT:
                self._on_damage(name, miss)
        except CacheStoreError as error:
            log.warning("a snapshot is not in the %s tier yet: %s", tier.name, error)

    def _take_back(self, name: EntryName, tier: BlobTier) -> None:
        """It was deleted while it was sent, or another took its place: that one is sent by its own note."""
        if local_manifest(self._area, name) is None:
            tier.discard(name)
            self._notes.forget_upload(name)
