"""A `preread serve` process of the demo's own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from .client import Client
from .errors import DemoError

ROOT = Path(__file__).parents[2]
# The command `preread` of this checkout, whatever else is installed under that name.
PREREAD = (sys.executable, "-c", "from service.cli import main; main()")
READY_S = 600.0
STOP_S = 30.0
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What may be chosen from outside: the rest of a user's settings (database, port, ...) is not for a demo.
TAKEN_OVER = (
    "PREREAD_ENGINE", "PREREAD_COMPUTE_DTYPE", "PREREAD_KV_TYPE", "PREREAD_THREADS", "PREREAD_MAX_DOCUMENT_TOKENS",
)  # fmt: skip


class Server:
    """Runs on a free port of the loopback address, with `data_dir` as its data directory."""

    def __init__(self, data_dir: Path, model_dir: Path, log: Path) -> None:
        self._data_dir = data_dir
        self._model_dir = model_dir
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> int:
        """Start the process; its id."""
        self.port = _free_port()
        command = [*PREREAD, "serve", "--port", str(self.port)]
        with self._log.open("ab") as log, signals_held_back():
            # A session of its own: Ctrl-C in the terminal reaches the demo, which then stops the server in order.
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        return self._process.pid

    def wait_ready(self, client: Client, on_wait: Callable[[str], None]) -> float:
        """Wait until a question would be answered; the seconds. Raises DemoError when that does not come."""
        began = time.monotonic()
        while waits_for := client.not_ready():
            if self._process is None or self._process.poll() is not None:
                raise DemoError("The server ended while it was starting.")
            if time.monotonic() - began > READY_S:
                raise DemoError(f"The server is not ready after {READY_S:.0f} s: {waits_for}")
            on_wait(waits_for)
            time.sleep(0.2)
        return time.monotonic() - began

    def stop(self) -> float:
        """SIGTERM, and wait until the process and all that it started are gone; the seconds.

        Raises DemoError when something was still there after half a minute; it is killed then.
        """
        if self._process is None:
            return 0.0
        began = time.monotonic()
        alive = _family(self._process.pid)
        try:
            self._process.send_signal(signal.SIGTERM)
            _, alive = psutil.wait_procs(alive, timeout=STOP_S)
        finally:
            for process in alive:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()
            self._process = None
        if alive:
            raise DemoError(f"{len(alive)} of the server's processes did not end within {STOP_S:.0f} s.")
        return time.monotonic() - began

    def log_tail(self, n_lines: int = 20) -> str:
        """The end of what the server wrote."""
        try:
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-n_lines:])
        except OSError:
            return ""

    def _environment(self) -> dict[str, str]:
        taken = {
            name: value for name, value in os.environ.items()
            if not name.startswith("PREREAD_") or name in TAKEN_OVER
        }  # fmt: skip
        return {
            **taken,
            "PYTHONPATH": str(ROOT),
            "PREREAD_DATA_DIR": str(self._data_dir),
            "PREREAD_MODEL": str(self._model_dir),
        }


@contextmanager
def signals_held_back() -> Iterator[None]:
    """A signal that would end the demo does so at the end of the block: never between making a process and
    knowing it, where it would be left behind."""
    caught: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: caught.append(number)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if caught:
        raise KeyboardInterrupt


def _family(pid: int) -> list[psutil.Process]:
    try:
        server = psutil.Process(pid)
        return [*server.children(recursive=True), server]
    except psutil.NoSuchProcess:
        return []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
