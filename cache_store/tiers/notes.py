"""What is still to be done in the tiers, as small files below the store: they outlive every process.

<root>/far/uploads/<flat key>/<fingerprint>    to be sent; the tiers that have not got it, one a line
<root>/far/placed/<flat key>/<fingerprint>     the tiers that have a copy, one a line, and since when that is known
<root>/far/removals/<tier>~<flat key>          to be removed there; nothing is brought from there meanwhile
"""

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cache_store.disk import names_in, storage_errors
from cache_store.errors import StorageFailed
from cache_store.keys import EntryName, SnapshotKey, flat_key, parse_flat_key

UNFINISHED_S = 60.0
"""A note is written in milliseconds."""
_TRIES = 100


class Notes:
    """Raises StorageFailed where a note cannot be made: what depends on it must not happen then."""

    def __init__(self, root: Path) -> None:
        self._uploads = root / "far" / "uploads"
        self._removals = root / "far" / "removals"
        self._placed = root / "far" / "placed"
        with storage_errors("preparing the notes of the tiers"):
            for path in (self._uploads, self._removals, self._placed):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def ask_upload(self, name: EntryName, tiers: Iterable[str]) -> None:
        _write(_place(self._uploads, name), tiers)

    def uploads(self) -> list[EntryName]:
        """What is to be sent."""
        keys = [key for flat in names_in(self._uploads) if (key := parse_flat_key(flat)) is not None]
        return [EntryName(key, digest) for key in keys for digest in _digests(self._uploads, key)]

    def wanting(self, name: EntryName) -> list[str]:
        """The tiers that have not got it yet."""
        return _read(_place(self._uploads, name))

    def uploaded(self, name: EntryName, tier: str, *, placed: bool = True) -> None:
        """A tier has it now, or will never (`placed` False)."""
        if placed:
            known = _times(_place(self._placed, name)) | {tier: time.time()}
            _write(_place(self._placed, name), _dated(known), durable=False)
        rest = [one for one in self.wanting(name) if one != tier]
        if rest:
            _write(_place(self._uploads, name), rest)
        else:
            _remove(_place(self._uploads, name))

    def forget_upload(self, name: EntryName) -> None:
        _remove(_place(self._uploads, name))

    def placed(self, name: EntryName) -> list[str]:
        """The tiers that are known to have a copy."""
        return list(_times(_place(self._placed, name)))

    def known_at(self, key: SnapshotKey) -> dict[str, float]:
        """When each tier that has a copy of a key was last seen to have it: sent, or brought from there (Unix time)."""
        found: dict[str, float] = {}
        for digest in _digests(self._placed, key):
            found |= _times(self._placed / flat_key(key) / digest)
        return found

    def of_key(self, key: SnapshotKey) -> dict[str, str]:
        """Each tier that has a copy of a key, or gets one: `ready` or `pending`."""
        found: dict[str, str] = {}
        for digest in _digests(self._uploads, key):
            found |= dict.fromkeys(_read(self._uploads / flat_key(key) / digest), "pending")
        return found | dict.fromkeys(self.known_at(key), "ready")

    def not_placed(self, name: EntryName, tier: str) -> None:
        """A tier has no copy any more."""
        rest = _times(_place(self._placed, name))
        if rest.pop(tier, None) is None:
            return
        if rest:
            _write(_place(self._placed, name), _dated(rest), durable=False)
        else:
            _remove(_place(self._placed, name))

    def forget(self, key: SnapshotKey) -> None:
        """Nothing is to be sent of a key, and nothing is known to be anywhere."""
        for directory in (self._uploads, self._placed):
            for digest in _digests(directory, key):
                _remove(directory / flat_key(key) / digest)

    def ask_removal(self, key: SnapshotKey, tier: str) -> None:
        _write(self._removals / f"{tier}~{flat_key(key)}", [tier])

    def removed(self, key: SnapshotKey, tier: str) -> None:
        _remove(self._removals / f"{tier}~{flat_key(key)}")

    def is_removed(self, key: SnapshotKey, tier: str) -> bool:
        """Whether a key is to be removed from a tier, and is not yet."""
        return (self._removals / f"{tier}~{flat_key(key)}").exists()

    def removals(self) -> list[tuple[SnapshotKey, str]]:
        """What is to be removed, and from which tier."""
        found: list[tuple[SnapshotKey, str]] = []
        for file_name in names_in(self._removals):
            tier, _, flat = file_name.partition("~")
            key = parse_flat_key(flat)
            if key is not None and "." not in file_name:
                found.append((key, tier))
        return found

    def sweep(self) -> list[str]:
        """Remove the notes that a killed process had not finished; their names. Other processes may write meanwhile."""
        directories = [self._removals]
        for kind in (self._uploads, self._placed):
            directories += [kind / flat for flat in names_in(kind)]
        paths = [directory / name for directory in directories for name in names_in(directory) if "." in name]
        left = [path for path in paths if _is_left(path)]
        for path in left:
            _remove(path)
        return [path.name for path in left]


def _place(directory: Path, name: EntryName) -> Path:
    return directory / flat_key(name.key) / name.fingerprint_digest


def _digests(directory: Path, key: SnapshotKey) -> list[str]:
    return [digest for digest in names_in(directory / flat_key(key)) if "." not in digest]


def _write(path: Path, lines: Iterable[str], *, durable: bool = True) -> None:
    """In one step: a note is never read half. A `durable` one is on the disk with its name when this returns: a loss of
    power must not forget what is still to be sent or removed."""
    data = "".join(f"{line}\n" for line in lines).encode()
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    with storage_errors("making a note of a tier"):
        for _ in range(_TRIES):
            # Who removes the last note of a key removes its directory.
            is_new = not path.parent.is_dir()
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):
                fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                try:
                    with os.fdopen(fd, "wb") as file:
                        file.write(data)
                        if durable:
                            file.flush()
                            os.fsync(fd)
                    os.rename(unfinished, path)
                    if durable:
                        _sync_names(path.parent, path.parent.parent if is_new else None)
                except FileNotFoundError:
                    raise
                except BaseException:
                    _remove(unfinished)
                    raise
                return
        raise StorageFailed(f"making a note of a tier: {path.parent} does not stay")


def _sync_names(*directories: Path | None) -> None:
    for directory in directories:
        if directory is not None:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _is_left(path: Path) -> bool:
    """Whether nobody writes an unfinished note any more: its process is gone, or another has its number since."""
    try:
        os.kill(int(path.name.rpartition(".")[2].partition("-")[0]), 0)
        return time.time() - path.lstat().st_mtime > UNFINISHED_S
    except PermissionError:
        return False
    except (OSError, ValueError, OverflowError):
        return True


def _read(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _times(path: Path) -> dict[str, float]:
    """Tiers of a note about placed copies, and since when that is known. One without times is as old as its file."""
    found: dict[str, float] = {}
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            tier, _, at = line.partition(" ")
            found[tier] = float(at) if at else path.stat().st_mtime
    return found


def _dated(times: dict[str, float]) -> list[str]:
    return [f"{tier} {at:.0f}" for tier, at in times.items()]


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()
    if "~" in path.parent.name:
        with suppress(OSError):
            path.parent.rmdir()
