"""One run of the engine process: started, its output logged, ended."""

import asyncio
import os
import signal
import sys
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

import service
from service.engine.factory import EngineConfig
from service.engine.protocol import EngineLost
from service.engine.remote.client import RemoteEngine
from service.engine.remote.wire import EXIT_CONFIG, READY

log = structlog.get_logger("engine")

KEPT_LINES = 20
MAX_SOCKET_PATH = 100
"""A Unix socket's path has at most 107 bytes on Linux, 103 on macOS."""


class EngineProcess:
    """A child process with its socket in a private directory; `start` makes one, `stop` removes all of it."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path) -> None:
        self._process = process
        self._directory = directory
        self._ready = asyncio.Event()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._pumps = [asyncio.create_task(self._pump(stream)) for stream in (process.stdout, process.stderr) if stream]

    @classmethod
    async def start(cls, config: EngineConfig) -> "EngineProcess":
        """Start the process; it is not ready yet."""
        directory = _private_directory()
        path = directory / "engine.json"
        path.write_bytes(msgspec.json.encode(config))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "service.engine.remote.server",
            "--config", str(path), "--socket", str(directory / "s"),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=_environment(config), limit=1 << 20, start_new_session=True,
        )  # fmt: skip
        return cls(process, directory)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_lines(self) -> str:
        """The end of what the process wrote."""
        return "\n".join(self._lines)

    @property
    def refused_configuration(self) -> bool:
        """Whether it ended because of its configuration: starting again would not help."""
        return self._process.returncode == EXIT_CONFIG

    async def connect(self, timeout_s: float) -> RemoteEngine:
        """Wait until the model is loaded, and connect. Raises EngineLost with what the process said."""
        ready, ended = (asyncio.create_task(c) for c in (self._ready.wait(), self._process.wait()))
        try:
            await asyncio.wait((ready, ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            ended.cancel()
        if self._ready.is_set():
            return await RemoteEngine.connect(str(self._directory / "s"))
        if self._process.returncode is None:
            raise EngineLost(f"the engine was not ready after {timeout_s:.0f} s")
        await asyncio.wait(self._pumps, timeout=1)
        raise EngineLost(f"the engine ended with status {self._process.returncode}: {self.last_lines}")

    async def wait(self) -> int:
        """The exit status, once it has ended."""
        return await self._process.wait()

    def kill(self) -> None:
        """SIGKILL, which also ends a process that was stopped."""
        self._signal(signal.SIGKILL)

    async def stop(self, drain_s: float) -> None:
        """SIGTERM, time to drain, SIGKILL; then remove its directory."""
        self._signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), drain_s)
        self._signal(signal.SIGKILL)
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.wait(self._pumps, timeout=1)
        for task in self._pumps:
            task.cancel()
        for name in ("engine.json", "s"):
            (self._directory / name).unlink(missing_ok=True)
        with suppress(OSError):
            self._directory.rmdir()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _pump(self, stream: asyncio.StreamReader) -> None:
        """Log what the process writes, line by line; an overlong line is cut into pieces."""
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text == READY:
                self._ready.set()
            elif text:
                self._lines.append(text)
                log.info("engine output", line=text, pid=self._process.pid)


def _private_directory() -> Path:
    """A new directory that only this user can enter, short enough for a socket in it."""
    directory = tempfile.mkdtemp(prefix="preread-")
    if len(directory) > MAX_SOCKET_PATH:
        Path(directory).rmdir()
        directory = tempfile.mkdtemp(prefix="preread-", dir="/tmp")
    return Path(directory)


def _environment(config: EngineConfig) -> dict[str, str]:
    """The child imports the packages this process runs, from wherever it was started."""
    root = str(Path(next(iter(service.__path__))).parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    more |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if config.threads:
        more["OMP_NUM_THREADS"] = str(config.threads)
    return os.environ | more
