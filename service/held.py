"""Directories that a process holds as long as it lives: those of one that was killed are nobody's, and removed."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path


def held_directory(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new directory of `parent` with `prefix` in its name, and the descriptor that holds it until it is closed.
    Others of that prefix that nobody holds are removed first. Raises OSError."""
    outer = os.open(parent, os.O_RDONLY)
    try:
        # Between making and holding a directory nobody else may take it for a left-over.
        fcntl.flock(outer, fcntl.LOCK_EX)
        _sweep(parent, prefix)
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = os.open(directory, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            directory.rmdir()
            raise
        return directory, lock
    finally:
        os.close(outer)


def _sweep(parent: Path, prefix: str) -> None:
    for leftover in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            lock = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover, ignore_errors=True)
            finally:
                os.close(lock)
