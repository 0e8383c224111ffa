"""Locks that work across processes and die with the process that held them."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from cache_store.errors import BuildLocked

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def exclusive(path: Path) -> Generator[None]:
    """Hold the lock file `path`, waiting for it. Not reentrant."""
    fd = os.open(path, _FLAGS, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class BuildLock:
    """The one-writer lock of a snapshot. Its file exists only while somebody holds or has just left it."""

    def __init__(self, path: Path) -> None:
        """Take the lock or raise BuildLocked."""
        self._path = path
        while True:
            self._fd = os.open(path, _FLAGS, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._fd)
                raise BuildLocked(f"{path.stem} is being built by another writer") from None
            if self._is_current():
                return
            os.close(self._fd)

    def _is_current(self) -> bool:
        """Whether the file locked is still the one at the path: its last holder may have removed it."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._fd >= 0:
            with suppress(OSError):
                os.unlink(self._path)
            os.close(self._fd)
            self._fd = -1


def share(directory_fd: int) -> None:
    """Mark an open directory as used until its descriptor is closed. Waits for who is taking it away just now."""
    # A file system without such locks has nothing evicted from it.
    with suppress(OSError):
        fcntl.flock(directory_fd, fcntl.LOCK_SH)


class Unused:
    """Directories that nobody uses, and nobody begins to use until the block ends; `all` says whether that holds for
    each of them. Missing ones do not count."""

    def __init__(self, *paths: Path) -> None:
        self.all = True
        self._fds: list[int] = []
        for path in paths:
            self.all = self.all and self._take(path)

    @staticmethod
    def is_used(path: Path) -> bool:
        """Whether somebody uses a directory right now."""
        with Unused(path) as unused:
            return not unused.all

    def __enter__(self) -> "Unused":
        return self

    def __exit__(self, *_: object) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def _take(self, path: Path) -> bool:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return True
        self._fds.append(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
