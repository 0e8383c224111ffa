"""Room for a snapshot's files, and the step that makes them visible: the same for what is built and what is brought."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from cache_store.area import Area
from cache_store.keys import EntryName
from cache_store.manifest import MANIFEST_NAME
from cache_store.shards import Shard


def reserve(
    area: Area, directory: Path, shards: Sequence[Shard], *, needed_nbytes: int, manifest_nbytes: int
) -> list[int]:
    """Make `directory` with files of their full length; descriptors of the shards, open for reading and writing.

    `needed_nbytes` must fit the budget. Quarantined copies give way, the oldest first. Raises BudgetExceeded, OSError;
    nothing is left then.
    """
    while True:
        with area.guard():
            if not area.ledger.shortfall(needed_nbytes):
                return _lay_out(area, directory, shards, manifest_nbytes)
        oldest = next(iter(area.quarantined()), None)
        if oldest is None:
            raise area.ledger.refuse(needed_nbytes)
        # A damaged copy must not keep its own replacement away.
        area.disk.remove(oldest.with_suffix(".json"))
        area.discard(oldest)


def write_manifest(area: Area, directory: Path, data: bytes, *, durable: bool = True) -> None:
    """Fill the file made for it. Its length and the account change together: whoever counts anew in between would count
    the difference twice."""
    fd = os.open(directory / MANIFEST_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        with area.guard():
            # A deletion may have taken the directory away, and its bytes off the account: StorageFailed then.
            if not os.path.samestat(os.fstat(fd), os.lstat(directory / MANIFEST_NAME)):
                raise FileNotFoundError(errno.ENOENT, "the build was removed meanwhile", str(directory))
            growth = len(data) - os.fstat(fd).st_size
            area.disk.truncate(fd, len(data))
            area.ledger.add(growth)
        area.disk.write_at(fd, data, 0)
        if durable:
            area.disk.sync_data(fd)
    finally:
        os.close(fd)


def move_into_place(area: Area, name: EntryName, directory: Path) -> None:
    """Rename the directory to its public name. What stood there ends up under the directory's name."""
    target = area.published(name)
    with area.guard():
        area.disk.make_dirs(area.snapshots, *name.key.parts)
        if not os.path.lexists(target):
            area.disk.rename(directory, target)
        elif not area.disk.exchange(directory, target):
            _replace_in_two_steps(area, directory, target)
        area.disk.sync_dir(target.parent)
        area.disk.remove(area.tombstone(name.key))


def _lay_out(area: Area, directory: Path, shards: Sequence[Shard], manifest_nbytes: int) -> list[int]:
    fds: list[int] = []
    nbytes = sum(shard.nbytes for shard in shards) + manifest_nbytes
    # Counted before it is there: whoever is killed in between leaves too high a number, never too low a one.
    area.ledger.add(nbytes)
    try:
        area.disk.make_dir(directory)
        for shard in shards:
            fds.append(area.disk.create(directory / shard.file_name, shard.nbytes))
        os.close(area.disk.create(directory / MANIFEST_NAME, manifest_nbytes))
    except BaseException:
        for fd in fds:
            os.close(fd)
        area.disk.remove(directory)
        area.ledger.add(-nbytes)
        raise
    return fds


def _replace_in_two_steps(area: Area, directory: Path, target: Path) -> None:
    aside = area.trash / directory.name
    area.disk.remove(aside)
    area.disk.rename(target, aside)
    area.disk.rename(directory, target)
    area.disk.rename(aside, directory)
