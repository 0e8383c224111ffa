"""A real server in a process of its own, started, asked, stopped and killed over a real socket."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import psutil

from tests.migrated import place

ROOT = Path(__file__).parents[2]
PREREAD = (sys.executable, "-c", "from service.cli import main; main()")
FAKE = (sys.executable, str(Path(__file__).with_name("fake_server.py")))
# Generous, for other tests run beside: they end what hangs.
START_S = 600.0
REQUEST_S = 600.0
LONGEST_PAUSE_S = 0.3
FINAL = frozenset({"ready", "failed", "cancelled"})
_LISTENS = re.compile(r"listens on (http://\S+?:\d+)")


class Server:
    """`preread serve` on a free port over its own data directory. A context manager that stops it.

    `settings` are environment variables without their prefix. With `fake` (fields of `EngineConfig`) a fake
    engine runs in the child process, and answers what its script says. `name` tells servers over one data directory
    apart.
    """

    running: ClassVar[list["Server"]] = []

    def __init__(self, data_dir: Path, *, fake: dict[str, Any] | None = None, name: str = "", **settings: Any) -> None:
        self.data_dir = data_dir
        self.name = name
        self.fake = fake
        self.settings = {"free_floor_bytes": 0, "log_format": "json", **settings}
        self.more: dict[str, str] = {}
        """Further variables of its environment."""
        self.url = ""
        self.client = httpx.Client(verify=False)
        """Keeps its connections, and may be used by several threads."""
        self._process: subprocess.Popen[bytes] | None = None
        self._children: list[psutil.Process] = []

    @property
    def log_path(self) -> Path:
        return self.data_dir.with_name(self.data_dir.name + self.name + ".log")

    @property
    def store(self) -> Path:
        return self.data_dir / "store"

    def start(self) -> "Server":
        """Start, and wait until a question would be answered."""
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if "database_url" not in self.settings:
            place(self.data_dir / "preread.sqlite3")
        seen = self.log_path.stat().st_size if self.log_path.exists() else 0
        command = [*PREREAD, "serve", "--port", "0"] if self.fake is None else [*FAKE, json.dumps(self.fake)]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment(), stdout=log, stderr=log, start_new_session=True
            )
        self.running.append(self)
        until(lambda: self._listens(seen), "the server does not listen", START_S)
        until(lambda: self.get("/health/ready").status_code == 200, "the server is not ready", START_S)
        self._children = psutil.Process(self._process.pid).children(recursive=True)
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def engine(self) -> psutil.Process:
        """The engine's process."""
        return engine_of(self.pid)

    def kill_engine(self) -> None:
        """SIGKILL to the engine's process; the server starts another one."""
        engine = self.engine()
        engine.kill()
        until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, "the engine lives on")

    def until_engine_is_back(self) -> None:
        until(lambda: "\npreread_engine_up 1.0" in self.get("/metrics").text, "the engine does not come back", START_S)

    def stop(self, within_s: float = 60.0) -> float:
        """SIGTERM; the seconds until everything had ended, which it must in order."""
        if not self.alive:
            return 0.0
        assert self._process is not None
        began = time.monotonic()
        self._children = psutil.Process(self.pid).children(recursive=True) or self._children
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server did not end within {within_s} s of SIGTERM") from None
        self._gone()
        # uvicorn hands the signal on once everything is closed.
        assert status in (0, -signal.SIGTERM), f"exit status {status}"
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL to the server alone; its engine must end by itself."""
        assert self._process is not None
        self._children = psutil.Process(self.pid).children(recursive=True) or self._children
        self._process.kill()
        self._process.wait()
        self._gone()

    def freeze(self) -> None:
        """SIGSTOP, as when a machine stands still."""
        psutil.Process(self.pid).suspend()

    def thaw(self) -> None:
        psutil.Process(self.pid).resume()

    def __enter__(self) -> "Server":
        return self if self.alive else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def copy(self, data_dir: Path) -> "Server":
        """A stopped server's twin over a copy of its data directory."""
        assert not self.alive
        shutil.copytree(self.data_dir, data_dir)
        return Server(data_dir, fake=self.fake, **self.settings)

    def run(self, *arguments: str, timeout_s: float = 300.0) -> "subprocess.CompletedProcess[str]":
        """`preread ARGUMENTS` over the data directory of this server, which must not run."""
        assert not self.alive
        return subprocess.run(
            [*PREREAD, *arguments],
            cwd=ROOT,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def tail(self, lines: int = 60) -> str:
        """The end of the log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    # What a client does.

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.client.request(method, path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def upload(self, content: bytes, name: str = "document.txt", **fields: str) -> dict[str, Any]:
        """The document as it was accepted."""
        response = self.request("POST", "/v1/documents", files={"file": (name, content)}, data=fields)
        assert response.status_code in (200, 202), response.text
        return response.json()

    def document(self, document_id: str) -> dict[str, Any]:
        return self.get(f"/v1/documents/{document_id}").json()

    def until_ended(self, document_id: str, within_s: float = 300.0) -> dict[str, Any]:
        """The document once its status is final."""
        return until(
            lambda: (body := self.document(document_id))["status"] in FINAL and body,
            f"{document_id} does not end",
            within_s,
            every_s=0.05,
        )

    def ready(self, content: bytes, name: str = "document.txt", **fields: str) -> dict[str, Any]:
        """A document that was uploaded and read."""
        body = self.until_ended(self.upload(content, name, **fields)["id"])
        assert body["status"] == "ready", body
        return body

    def session(self, document_id: str) -> str:
        response = self.request("POST", "/v1/sessions", json={"document_ids": [document_id]})
        assert response.status_code == 201, response.text
        return response.json()["id"]

    def question(self, session_id: str, text: str = "What is it?", **options: Any) -> httpx.Response:
        body = {"question": text, **options}
        return self.request("POST", f"/v1/sessions/{session_id}/questions", json=body)

    def ask(self, session_id: str, text: str = "What is it?", **options: Any) -> dict[str, Any]:
        """A whole answer."""
        response = self.question(session_id, text, **options)
        assert response.status_code == 200, response.text
        return response.json()

    @contextmanager
    def streaming(self, session_id: str, text: str = "What is it?", **options: Any) -> Iterator[httpx.Response]:
        """The open event stream of an answer; leaving the block closes the connection."""
        body = {"question": text, "stream": True, **options}
        with self.client.stream("POST", f"/v1/sessions/{session_id}/questions", json=body) as response:
            assert response.status_code == 200, response.read()
            yield response

    def turns(self, session_id: str) -> list[dict[str, Any]]:
        return self.get(f"/v1/sessions/{session_id}").json()["turns"]

    def engine_stat(self, name: str) -> float:
        """One of the engine's own figures, from `/metrics`."""
        found = re.search(rf"^preread_engine_{name} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        assert found, f"there is no preread_engine_{name}"
        return float(found[1])

    @property
    def environment(self) -> dict[str, str]:
        """The settings as `preread` reads them."""
        return {
            f"PREREAD_{name.upper()}": str(value)
            for name, value in {"data_dir": self.data_dir, **self.settings}.items()
        }

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREREAD_")}
        return kept | self.environment | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | self.more

    def _listens(self, seen: int) -> bool:
        assert self.alive, "the server ended while it started:\n" + self.tail()
        found = _LISTENS.search(self.log_path.read_bytes()[seen:].decode(errors="replace"))
        if found:
            self.url = found[1]
            self.client = httpx.Client(base_url=self.url, timeout=REQUEST_S, trust_env=False, verify=False)
        return bool(found)

    def _gone(self) -> None:
        self.running.remove(self)
        self.client.close()
        _, alive = psutil.wait_procs(self._children, timeout=60)
        for process in alive:
            process.kill()
        assert not alive, f"processes outlived the server: {alive}"


def engine_of(pid: int) -> psutil.Process:
    """The engine's process of a server or worker."""
    for child in psutil.Process(pid).children():
        if any("service.engine.remote" in part for part in child.cmdline()):
            return child
    raise AssertionError("the server has no engine process")


def until(check: Callable[[], Any], what: str, within_s: float = 120.0, *, every_s: float = 0.02) -> Any:
    """What `check` gives once it is true. Asks less often the longer it takes: asking costs the server time too."""
    began = time.monotonic()
    while not (found := check()):
        waited_s = time.monotonic() - began
        assert waited_s < within_s, f"{what} (after {within_s} s)"
        time.sleep(max(every_s, min(waited_s / 20, LONGEST_PAUSE_S)))
    return found


def files_below(path: Path) -> list[str]:
    """Relative names of all files below a directory."""
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir())
