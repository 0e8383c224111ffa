"""The one interface of all tiers beyond the disk. They hold the very bytes of the files on disk.

A copy is a manifest and shards. Shards are named by a *generation*, the checksum of the manifest they belong to, so
that a reader of one copy never gets bytes of another that takes its place meanwhile. A copy is visible when its
manifest is, which is written last and removed first.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import xxhash

from cache_store.area import Removed
from cache_store.keys import EntryName, SnapshotKey


@dataclass(frozen=True, slots=True)
class TierEntry:
    """A copy in a tier. `changed_at`: when it was written (Unix seconds), None where that is not known. `complete`: its
    manifest is there."""

    name: EntryName
    nbytes: int
    changed_at: float | None = None
    complete: bool = True


Arrived = Callable[[int], None]


def silent(n: int) -> None:
    """An `Arrived` that does nothing."""


class BlobTier(Protocol):
    """Copies of snapshots. Blocking, any thread; every method may raise TierDown.

    `name` is what answers and listings call it. A `durable` one keeps what it was given until it is told otherwise, a
    cache does not. `n_streams`: how many shards to read at once.
    """

    name: str
    durable: bool
    n_streams: int

    def manifest(self, name: EntryName) -> bytes | None:
        """The bytes of a copy's manifest, unchecked; None when there is no copy."""
        ...

    def read(self, name: EntryName, generation: str, shard: int, memory: memoryview, arrived: Arrived = silent) -> int:
        """Bring a shard into memory of its length; how many bytes there were, at most one more than that, 0 when there
        is no such shard. Unchecked. `arrived` may be told how many bytes of it are there as it grows; what that raises
        (no OSError) ends the reading."""
        ...

    def write(self, name: EntryName, manifest: bytes, nbytes: int, shards: Iterable[memoryview]) -> None:
        """Store a copy in place of an earlier one; `nbytes` are those of all shards together. The memory of a shard is
        used again for the next. Raises TierRefused; what `shards` raises leaves nothing visible."""
        ...

    def touch(self, name: EntryName) -> None:
        """Say that a copy was used."""
        ...

    def discard(self, name: EntryName) -> Removed:
        """Remove the copy of one name."""
        ...

    def remove(self, key: SnapshotKey) -> Removed:
        """Remove all copies of a key, unfinished ones too."""
        ...

    def entries(self) -> Iterator[TierEntry]:
        """Everything the tier holds."""
        ...

    def used(self) -> int:
        """Bytes of all copies."""
        ...

    def close(self) -> None: ...


def generation_of(manifest: bytes) -> str:
    """16 hex digits that name the shards of a copy."""
    return xxhash.xxh3_64_hexdigest(manifest)
