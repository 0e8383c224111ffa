"""Moves a damaged snapshot out of the way: it is never tried twice, and can still be looked at."""

import os
import stat
import time
from pathlib import Path

import msgspec

from cache_store.area import Area
from cache_store.keys import EntryName


class QuarantineNote(msgspec.Struct, frozen=True):
    """Why a snapshot was set aside, and when (Unix seconds). Kept beside it as JSON."""

    reason: str
    detail: str
    at: float


def set_aside(area: Area, name: EntryName, note: QuarantineNote, directory_id: tuple[int, int] | None = None) -> bool:
    """Move a published snapshot to the quarantine, in place of an earlier copy of the same name.

    With `directory_id` (device and inode) only that very directory is moved: a reader that finds damage
    must not take away what another process has published meanwhile. False when there was nothing to move.
    """
    target = area.quarantine / name.flat
    note_path = target.with_suffix(".json")
    with area.guard():
        source = _movable(area.snapshots, name)
        if source is None or (directory_id is not None and not _is(source, directory_id)):
            return False
        aside = area.trash / f"{name.flat}~{time.time_ns():x}"
        replaced = os.path.lexists(target)
        if replaced:
            area.disk.rename(target, aside)
        area.disk.remove(note_path)
        area.disk.rename(source, target)
        area.disk.sync_dir(source.parent)
        _write_note(area, note_path, note)
    if replaced:
        area.discard(aside)
    return True


def read_note(area: Area, name: EntryName) -> QuarantineNote | None:
    """The note of a quarantined snapshot, if it can be read."""
    try:
        data = (area.quarantine / f"{name.flat}.json").read_bytes()
        return msgspec.json.decode(data, type=QuarantineNote)
    except (OSError, msgspec.DecodeError):
        return None


def _movable(snapshots: Path, name: EntryName) -> Path | None:
    """The snapshot's directory, or whatever stands in the way to it: a link is moved, not followed."""
    path = snapshots
    for part in name.parts:
        path = path / part
        try:
            if not stat.S_ISDIR(path.lstat().st_mode):
                return path
        except FileNotFoundError:
            return None
    return path


def _is(path: Path, directory_id: tuple[int, int]) -> bool:
    """Whether `path` is that directory, or no directory at all and thus never a good snapshot."""
    status = path.lstat()
    return not stat.S_ISDIR(status.st_mode) or (status.st_dev, status.st_ino) == directory_id


def _write_note(area: Area, path: Path, note: QuarantineNote) -> None:
    fd = area.disk.create(path, 0)
    try:
        area.disk.write_at(fd, msgspec.json.encode(note), 0)
    finally:
        os.close(fd)
