"""A real `preread worker` in a process of its own, beside the servers that use it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.server import PREREAD, ROOT, START_S, engine_of, until

FAKE_WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))
_SERVES = re.compile(rb"worker (\S+) serves")


class WorkerProcess:
    """`preread worker` over its own data directory. A context manager that stops it. `settings` and `fake` are as those
    of `Server`."""

    def __init__(self, data_dir: Path, *, fake: dict[str, Any] | None = None, **settings: Any) -> None:
        self.data_dir = data_dir
        self.fake = fake
        self.settings = {"free_floor_bytes": 0, "log_format": "json", "engine": "fake", **settings}
        self.more: dict[str, str] = {}
        """Further variables of its environment."""
        self.id = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._children: list[psutil.Process] = []
        self._frozen: list[psutil.Process] = []

    @property
    def log_path(self) -> Path:
        return self.data_dir.with_name(self.data_dir.name + ".worker.log")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> "WorkerProcess":
        """Start, and wait until its engine answers."""
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        seen = self.log_path.stat().st_size if self.log_path.exists() else 0
        command = [*PREREAD, "worker"] if self.fake is None else [*FAKE_WORKER, json.dumps(self.fake)]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment(), stdout=log, stderr=log, start_new_session=True
            )
        until(lambda: self._serves(seen), "the worker does not start", START_S)
        self._look()
        return self

    def stop(self, within_s: float = 60.0) -> int:
        """SIGTERM; its exit status."""
        assert self._process is not None
        self._look()
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(within_s)
        finally:
            self.kill()
        return status

    def kill(self) -> None:
        """SIGKILL to it alone; its engine must end by itself."""
        assert self._process is not None
        self._look()
        self._process.kill()
        self._process.wait()
        _, alive = psutil.wait_procs(self._children, timeout=60)
        for process in alive:
            process.kill()
        assert not alive, f"processes outlived the worker: {alive}"

    def kill_engine(self) -> None:
        """SIGKILL to its engine; the worker starts another one."""
        self.engine().kill()

    def freeze(self) -> None:
        """SIGSTOP to it and its engine, as when a machine stands still."""
        self._look()
        self._frozen = [psutil.Process(self.pid), *self._children]
        for process in self._frozen:
            process.suspend()

    def thaw(self) -> None:
        for process in reversed(self._frozen):
            process.resume()

    def engine(self) -> psutil.Process:
        """The engine's process, as it is now."""
        return engine_of(self.pid)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def __enter__(self) -> "WorkerProcess":
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop()

    def _look(self) -> None:
        """Know its children, of which one may have been replaced."""
        if self._process is not None and self._process.poll() is None:
            self._children = psutil.Process(self.pid).children(recursive=True) or self._children

    def _serves(self, seen: int) -> bool:
        assert self._process is not None
        text = self.log_path.read_bytes()[seen:]
        assert self._process.poll() is None, "the worker ended while it started:\n" + text.decode(errors="replace")
        if found := _SERVES.search(text):
            self.id = found[1].decode()
        return bool(found)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREREAD_")}
        own = {"data_dir": self.data_dir, **self.settings}
        named = {f"PREREAD_{name.upper()}": str(value) for name, value in own.items()}
        return kept | named | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | self.more
