"""A disk that can be filled to the last byte and freed again, under a running server."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psutil

DISK_NBYTES = 32 << 20
_TRIES = 20


class Running(Protocol):
    """A server or a worker."""

    @property
    def pid(self) -> int: ...


class SmallDisk:
    """A file system of its own; where none can be mounted, a limit on the size of files that the server's
    processes may write, which fails at the same places."""

    def __init__(self, path: Path, mounted: bool, nbytes: int) -> None:
        self.path = path
        self._mounted = mounted
        self._nbytes = nbytes

    def fill(self, server: Running, *, leave_nbytes: int = 0) -> None:
        """From now on at most `leave_nbytes` more can be written."""
        if self._mounted:
            self._shrink(leave_nbytes)
        else:
            self._limit_files(server, leave_nbytes)

    def free(self, server: Running) -> None:
        if self._mounted:
            assert self._resize(self._nbytes)
        else:
            self._limit_files(server, resource.RLIM_INFINITY)

    def _shrink(self, leave_nbytes: int) -> None:
        for _ in range(_TRIES):  # no smaller than what is there, which may be more by now
            status = os.statvfs(self.path)
            used = (status.f_blocks - status.f_bfree) * status.f_frsize
            if self._resize(max(used + leave_nbytes, status.f_frsize)):
                return
        raise AssertionError(f"{self.path} cannot be made smaller")

    def _resize(self, nbytes: int) -> bool:
        command = ["mount", "-o", f"remount,size={nbytes}", str(self.path)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    @staticmethod
    def _limit_files(server: Running, nbytes: int) -> None:
        parent = psutil.Process(server.pid)
        for process in (parent, *parent.children(recursive=True)):
            _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
            process.rlimit(psutil.RLIMIT_FSIZE, (nbytes, hard))


@contextmanager
def small_disk(path: Path, nbytes: int = DISK_NBYTES) -> Iterator[SmallDisk]:
    path.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=0700", "tmpfs", str(path)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield SmallDisk(path, mounted, nbytes)
    finally:
        if mounted:
            subprocess.run(["umount", str(path)], check=True)
