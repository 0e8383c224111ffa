"""A disk that can be filled to the last byte and freed again, under a running server."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.e2e.server import Server

DISK_NBYTES = 32 << 20


class SmallDisk:
    """A file system of its own; where none can be mounted, a limit on the size of files that the server's
    processes may write, which fails at the same places."""

    def __init__(self, path: Path, mounted: bool) -> None:
        self.path = path
        self._mounted = mounted
        self._ballast = path / "ballast"

    def fill(self, server: Server, *, leave_nbytes: int = 0) -> None:
        """From now on at most `leave_nbytes` more can be written."""
        if self._mounted:
            self._write_ballast(leave_nbytes)
        else:
            self._limit_files(server, leave_nbytes)

    def free(self, server: Server) -> None:
        if self._mounted:
            self._ballast.unlink()
        else:
            self._limit_files(server, resource.RLIM_INFINITY)

    def _write_ballast(self, leave_nbytes: int) -> None:
        status = os.statvfs(self.path)
        nbytes = status.f_bavail * status.f_frsize - leave_nbytes
        with self._ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, nbytes))

    @staticmethod
    def _limit_files(server: Server, nbytes: int) -> None:
        for process in (psutil.Process(server.pid), server.engine()):
            _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
            process.rlimit(psutil.RLIMIT_FSIZE, (nbytes, hard))


@contextmanager
def small_disk(path: Path) -> Iterator[SmallDisk]:
    path.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_NBYTES}", "tmpfs", str(path)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield SmallDisk(path, mounted)
    finally:
        if mounted:
            subprocess.run(["umount", str(path)], check=True)
