"""The directory of a run's snapshots, and those that killed runs left behind."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = ".bench-"


@contextmanager
def own_directory(data_dir: Path, tell: Callable[[str], object]) -> Iterator[Path]:
    """A directory that is removed at the end; `tell` is told why it could not be. Left-overs that no process holds are
    removed first. Raises OSError."""
    data_dir.mkdir(parents=True, exist_ok=True)
    directory, lock = _locked(data_dir)
    try:
        yield Path(directory.name)
    finally:
        try:
            directory.cleanup()
        except OSError as error:  # takes no figure with it
            tell(f"{directory.name} could not be removed: {error}")
        os.close(lock)


def _locked(data_dir: Path) -> tuple[tempfile.TemporaryDirectory[str], int]:
    parent = os.open(data_dir, os.O_RDONLY)
    try:
        # Between making and locking a directory no other run may take it for a left-over.
        fcntl.flock(parent, fcntl.LOCK_EX)
        _sweep(data_dir)
        directory = tempfile.TemporaryDirectory(dir=data_dir, prefix=PREFIX)
        lock = os.open(directory.name, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return directory, lock
    finally:
        os.close(parent)


def _sweep(data_dir: Path) -> None:
    for leftover in data_dir.glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover, ignore_errors=True)
            finally:
                os.close(lock)
