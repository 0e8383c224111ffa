"""A real PostgreSQL in a process of its own, on a free port of the loopback, with its files in a temporary folder."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.cache_store.tiers.servers import free_port

_SETTINGS = ("fsync=off", "full_page_writes=off", "unix_socket_directories=", "shared_buffers=32MB")
"""Only a crash of the machine needs the first two: what a killed server wrote is there."""


def program(name: str) -> str:
    """A program of PostgreSQL; Debian has them beside the path."""
    if found := shutil.which(name):
        return found
    beside = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    assert beside, f"there is no {name}: install PostgreSQL (Debian: apt-get install postgresql)"
    return str(beside[-1])


class PostgresServer:
    """Started by `start`, ended by `close`, which removes its files. PostgreSQL refuses to run as root: then it is run
    as the user `postgres` of Debian's package. `below`: where its folder is made; everybody must be able to pass."""

    def __init__(self, below: Path | None = None) -> None:
        self.port = free_port()
        self._directory = Path(tempfile.mkdtemp(prefix="preread-postgres-", dir=below))
        self._data = self._directory / "data"
        self._user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.getuid() == 0 else {}
        if self._user:
            shutil.chown(self._directory, "postgres", "postgres")
        self._n_databases = 0
        self._run("initdb", "--no-sync", "--auth=trust", "--username=preread", "--encoding=UTF8", "--locale=C")
        self.start()

    def start(self) -> None:
        """Again on the same port, with what it had."""
        options = [part for setting in _SETTINGS for part in ("-c", setting)]
        command = [program("postgres"), "-D", str(self._data), "-h", "127.0.0.1", "-p", str(self.port), *options]
        until = time.monotonic() + 60
        while True:
            self.process = subprocess.Popen(
                command, cwd=self._directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **self._user
            )
            while self.process.poll() is None:
                if self._answers():
                    return
                assert time.monotonic() < until, "PostgreSQL does not answer"
                time.sleep(0.02)
            # After a kill its children take a moment to notice, and keep the files until then.
            assert time.monotonic() < until, "PostgreSQL does not start"
            time.sleep(0.1)

    @property
    def pid(self) -> int:
        return self.process.pid

    def new_database(self) -> str:
        """The URL of an empty database."""
        self._n_databases += 1
        name = f"test_{self._n_databases}"
        self.sql(f"CREATE DATABASE {name}")
        return f"postgresql://preread@127.0.0.1:{self.port}/{name}"

    def sql(self, statement: str, database: str = "postgres") -> str:
        """What a statement gives, as psql prints it."""
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "preread", "-d", database]
        command = [program("psql"), *where, "-X", "-t", "-A", "-v", "ON_ERROR_STOP=1", "-c", statement]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    def kill(self) -> None:
        """SIGKILL to all of it."""
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        psutil.wait_procs(family[1:], timeout=60)

    def freeze(self) -> None:
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.thaw()
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(60)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _answers(self) -> bool:
        command = [program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(command, timeout=60, check=False).returncode == 0

    def _run(self, name: str, *arguments: str) -> None:
        command = [program(name), "-D", str(self._data), *arguments]
        subprocess.run(
            command, cwd=self._directory, check=True, capture_output=True, timeout=120, **self._user
        )  # fmt: skip

    def _signal_all(self, number: signal.Signals) -> None:
        parent = psutil.Process(self.process.pid)
        for process in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):  # those of closed connections end by themselves
                process.send_signal(number)
