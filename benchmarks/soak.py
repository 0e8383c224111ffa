"""Many questions by several clients who now and then leave in the middle of an answer: what grows, what leaks.

    python -m benchmarks.soak                     the demo model on a small document
    python -m benchmarks.soak --fake              no model
    python -m benchmarks.soak --questions 3000 --clients 8

Prints a table and, as the last line, JSON; ends with status 1 when something grew by more than 5 % or leaked.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.server import ROOT, Server, until
from tests.e2e.sse import events_of

LIMIT = 0.05
"""Allowed growth of resident memory after the warm-up."""
FD_SLACK = 8
"""Descriptors more than in the warm-up that are no leak: pools keep connections of the database and of HTTP."""
TURNS_PER_SESSION = 4
DISCONNECT_SHARE = 0.25
GRACE_S = 0.3
QUESTIONS = (
    "How much does the repair cost?",
    "Who is the workshop foreman?",
    "How long is the crack in the soundboard?",
    "What is the salary of the foreman?",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server's and the engine's processes hold after so many questions. Sizes in bytes."""

    questions: int
    server_rss: int
    engine_rss: int
    server_fds: int
    engine_fds: int


@dataclass
class Report:
    """`left`: the engine's gauges once all sessions are gone, which must be zero."""

    samples: list[Sample] = field(default_factory=list)
    answered: int = 0
    disconnected: int = 0
    seconds: float = 0.0
    left: dict[str, float] = field(default_factory=dict)

    def growth(self, name: str) -> float:
        """From the largest value during the warm-up (the first half of the samples) to the last one."""
        base, last = self._ends(name)
        return last / base - 1

    def leaked(self, name: str) -> int:
        """As `growth`, in descriptors."""
        base, last = self._ends(name)
        return last - base

    def _ends(self, name: str) -> tuple[int, int]:
        values = [getattr(sample, name) for sample in self.samples]
        return max(values[: (len(values) + 1) // 2]), values[-1]

    def faults(self) -> list[str]:
        """What is wrong; empty when all is well."""
        found = [f"{name} grew by {self.growth(name):.1%}" for name in _RSS if self.growth(name) >= LIMIT]
        found += [f"{name} leaked" for name in _FDS if self.leaked(name) > FD_SLACK]
        return found + [f"{name} is {value:g}" for name, value in self.left.items() if value]


_RSS = ("server_rss", "engine_rss")
_FDS = ("server_fds", "engine_fds")


class Soak:
    """`n_clients` threads, each with sessions of its own on one document."""

    def __init__(self, server: Server, document_id: str, *, max_tokens: int, seed: int = 7) -> None:
        self._server = server
        self._document_id = document_id
        self._max_tokens = max_tokens
        self._seed = seed
        self._lock = threading.Lock()
        self._n_asked = 0
        self.report = Report()

    def run(self, n_questions: int, n_clients: int, n_samples: int = 12) -> Report:
        """Ask at least so many, and sample at equal distances while no answer runs."""
        began = time.monotonic()
        each = -(-n_questions // (n_clients * n_samples))
        with ThreadPoolExecutor(n_clients) as pool:
            for round_number in range(n_samples):
                rounds = [pool.submit(self._client, n, round_number, each) for n in range(n_clients)]
                for one in rounds:
                    one.result()
                self._settle()
                self.report.samples.append(self._sample())
        self.report.seconds = time.monotonic() - began
        self.report.left = self._left()
        return self.report

    def _client(self, client: int, round_number: int, n_questions: int) -> None:
        chance = random.Random(f"{self._seed}/{client}/{round_number}")
        session_id, n_turns = "", TURNS_PER_SESSION
        for _ in range(n_questions):
            if n_turns == TURNS_PER_SESSION:
                self._leave(session_id)
                session_id, n_turns = self._server.session(self._document_id), 0
            self._ask(session_id, chance)
            n_turns += 1
        self._leave(session_id)

    def _ask(self, session_id: str, chance: random.Random) -> None:
        leaves = chance.random() < DISCONNECT_SHARE
        n_events = chance.randrange(1, 6) if leaves else None
        question = chance.choice(QUESTIONS)
        with self._server.streaming(session_id, question, max_tokens=self._max_tokens) as response:
            events = list(islice(events_of(response), n_events))
        ended = events[-1].name == "done"
        if leaves and not ended:
            until(lambda: self._server.turns(session_id)[-1]["status"] != "running", "the answer goes on", 60)
        with self._lock:
            self.report.answered += ended
            self.report.disconnected += not ended
            self._n_asked += 1

    def _leave(self, session_id: str) -> None:
        if session_id:
            assert self._server.request("DELETE", f"/v1/sessions/{session_id}").status_code == 204

    def _settle(self) -> None:
        until(lambda: self._server.engine_stat("running") == 0, "answers go on", 60)

    def _sample(self) -> Sample:
        server, engine = psutil.Process(self._server.pid), self._server.engine()
        rss = (server.memory_info().rss, engine.memory_info().rss)
        return Sample(self._n_asked, *rss, server.num_fds(), engine.num_fds())

    def _left(self) -> dict[str, float]:
        names = ("running", "waiting", "document_references", "tail_slots_used")
        with suppress(AssertionError):
            until(lambda: not any(map(self._server.engine_stat, names)), "something is held", 10)
        return {name: self._server.engine_stat(name) for name in names}


@contextmanager
def small_document(fake: bool, model_dir: str, data_dir: Path) -> Iterator[tuple[Server, str]]:
    """A server with a document of some hundred tokens that is ready."""
    options: dict[str, Any] = {"disconnect_grace_s": GRACE_S, "log_level": "warning"}
    if fake:
        options["fake"] = {"fake_script": [97] * 400, "fake_step_s": 0.002}
    elif model_dir:
        options["model"] = model_dir
    with Server(data_dir, **options) as server:
        yield server, server.ready((ROOT / "examples" / "letter.txt").read_bytes())["id"]


def table(report: Report) -> str:
    """The samples for people, sizes in MiB."""
    lines = ["questions  server MiB  engine MiB  server fds  engine fds"]
    for s in report.samples:
        rss = f"{s.server_rss / 2**20:10.1f}  {s.engine_rss / 2**20:10.1f}"
        lines.append(f"{s.questions:9}  {rss}  {s.server_fds:10}  {s.engine_fds:10}")
    growth = "  ".join(f"{name} {report.growth(name):+.1%}" for name in _RSS)
    lines.append(f"growth after warm-up: {growth}")
    lines.append(f"{report.answered} answered, {report.disconnected} left, {report.seconds:.0f} s; held at the end:")
    lines.append("  ".join(f"{name} {value:g}" for name, value in report.left.items()))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--fake", action="store_true", help="a fake engine: no model is needed")
    parser.add_argument("--model", default="", help="an imported model's directory; else the one `preread` finds")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="preread-soak-") as scratch:
        with small_document(chosen.fake, chosen.model, Path(scratch) / "data") as (server, document_id):
            soak = Soak(server, document_id, max_tokens=chosen.max_tokens)
            report = soak.run(chosen.questions, chosen.clients)
    print(table(report))
    faults = report.faults()
    print("\n".join(faults) or "nothing grew, nothing leaked")
    print(json.dumps(asdict(report) | {"faults": faults}))
    return bool(faults)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt, httpx.HTTPError):
        sys.exit(main())
