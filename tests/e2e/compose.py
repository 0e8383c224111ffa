"""Services of docker-compose.yml as plain processes: their very commands, environments and health checks."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.server import PREREAD, ROOT, START_S, until

SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


def resolve(value: str) -> str:
    """With no variable set: `${NAME:-default}` is its default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


@dataclass
class Place:
    """What a container would have elsewhere: `paths` and `hosts` of the file, and what stands for them here. `extra` is
    added to the environment."""

    directory: Path
    paths: dict[str, str]
    extra: dict[str, str] = field(default_factory=dict)

    def here(self, text: str) -> str:
        for there, here in self.paths.items():
            text = text.replace(there, here)
        return text


class Service:
    """One service. A context manager that stops it as the container engine would."""

    def __init__(self, name: str, place: Place, **extra: str) -> None:
        self.name, self.place, self.extra = name, place, extra
        self.spec = SERVICES[name]
        self.data_dir = place.directory / name
        self.data_dir.mkdir(exist_ok=True, mode=0o700)
        self.log_path = place.directory / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, timeout_s: float = START_S) -> "subprocess.CompletedProcess[str]":
        """Of a service that ends by itself."""
        return subprocess.run(
            self._command(self.spec["command"]), cwd=ROOT, env=self.environment, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip

    def check(self) -> "subprocess.CompletedProcess[str]":
        """The health check."""
        kind, *words = self.spec["healthcheck"]["test"]
        words = [self.place.here(word) for word in words]
        command = ["sh", "-c", *words] if kind == "CMD-SHELL" else self._command(words)
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )

    def start(self) -> "Service":
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(self.spec["command"]), cwd=ROOT, env=self.environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        return self

    def until_healthy(self) -> None:
        def healthy() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log_path.read_text()[-4000:]
            return self.check().returncode == 0

        until(healthy, f"{self.name} does not become healthy", START_S, every_s=1.5)

    def stop(self) -> int:
        """The exit status; it must end within the time that the file gives it."""
        assert self.process is not None
        self.process.send_signal(signal.Signals[self.spec.get("stop_signal", "SIGTERM")])
        began = time.monotonic()
        status = self.process.wait(seconds(self.spec["stop_grace_period"]))
        assert time.monotonic() - began < seconds(self.spec["stop_grace_period"])
        return status

    def __enter__(self) -> "Service":
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREREAD_", "AWS_"))}
        given = {
            name: self.place.here(resolve(value).replace("/var/lib/preread", str(self.data_dir)))
            for name, value in self.spec.get("environment", {}).items()
        }
        return kept | given | {"PYTHONPATH": str(ROOT)} | self.place.extra | self.extra

    def _command(self, words: list[str]) -> list[str]:
        program, *rest = [self.place.here(resolve(word)) for word in words]
        if program == "python":
            return [sys.executable, *rest]
        if program == "preread":
            return [*PREREAD, *rest]
        # The image's entry point is `preread`.
        return [*PREREAD, program, *rest] if self.spec["image"].startswith("preread") else [program, *rest]
