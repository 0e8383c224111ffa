"""What it costs an API process to relay the tokens of a fleet, and what a fleet adds to the first one.

    python -m benchmarks.relay [--streams 300] [--tokens 200] [--rate 20] [--rounds 3] [--json FILE]
    python -m benchmarks.relay --page FILE    # put what --json wrote on this machine into docs/performance.md

A fake engine says `--rate` tokens a second in each of `--streams` answers, which one `preread serve` takes from a
worker over a real Redis and streams to as many clients. Its processor time while all of them run, and that of a bare
ASGI application that sends the same events at the same pace on the same server, are measured in turns, `--rounds`
times; the medians are compared. `client` is the part of the fleet's client in it, without HTTP. Then time to first
token: of single questions to a server with an engine of its own, and to one with a worker, in turns. redis-server must
be there.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bench_report import machine, table, write_section
from benchmarks.relay_parts import free_port
from tests.cache_store.tiers.servers import RedisServer
from tests.e2e.fleet import WorkerProcess
from tests.e2e.server import ROOT, Server, until
from tests.e2e.sse import events_of

PARTS = (sys.executable, "-m", "benchmarks.relay_parts")
TEXT = b"The keeper of the lighthouse is Marta Kovalenko. " * 20
QUIET = {"log_level": "warning"}


@contextmanager
def process(*arguments: object) -> Iterator[psutil.Process]:
    """One of the parts, ended with the block."""
    started = subprocess.Popen([*PARTS, *map(str, arguments)], cwd=ROOT)
    try:
        yield psutil.Process(started.pid)
    finally:
        started.kill()
        started.wait()


def cpu_s(of: psutil.Process) -> float:
    times = of.cpu_times()
    return times.user + times.system


class Meter:
    """Processor time of processes, looked at all the time."""

    def __init__(self, of: list[psutil.Process]) -> None:
        self._of = of
        self._seen: list[tuple[float, list[float]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Meter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> tuple[float, list[float]]:
        """Seconds that passed, and those that each process computed, in a part of the time."""
        seen = [each for each in self._seen if begin <= each[0] <= end]
        (first, before), (last, after) = seen[0], seen[-1]
        return last - first, [b - a for a, b in zip(before, after, strict=True)]

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self._seen.append((time.monotonic(), [cpu_s(each) for each in self._of]))


def measured(of: list[psutil.Process], port: int, requests: list[list[str]], directory: Path) -> dict[str, Any]:
    """What the load saw, and the processor time of these processes for each token."""
    path = directory / "requests.json"
    path.write_text(json.dumps(requests))
    command = [*PARTS, "load", str(port), str(path)]
    with Meter(of) as meter:
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    seen = json.loads(done.stdout)
    assert seen["end"] > seen["begin"] + 1, "the answers are too short to run side by side: more --tokens"
    seen["tokens_per_s"] = seen["tokens"] / (seen["end"] - seen["begin"])
    seconds, spent = meter.between(seen["begin"], seen["end"])
    return seen | {"cpu_us": [round(s / seconds / seen["tokens_per_s"] * 1e6, 1) for s in spent]}


def listens(port: int) -> bool:
    return any(c.laddr.port == port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)


def relay(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The streams, through a bare application and through the product, in turns."""
    pace = arguments.streams, arguments.tokens, 1 / arguments.rate
    with ExitStack() as stack:
        redis = RedisServer(directory)
        stack.callback(redis.kill)
        worker = stack.enter_context(process("worker", redis.url, *pace))
        port = free_port()
        bare = stack.enter_context(process("bare", port, *pace))
        limits = {"queue_limit": arguments.streams + 10, "max_batch": 256}
        server = Server(directory / "api", engine="fake", fleet_url=redis.url, **limits, **QUIET)
        stack.enter_context(server)
        document = server.ready(TEXT)["id"]
        sessions = [server.session(document) for _ in range(arguments.streams)]
        body = json.dumps({"question": "What is it?", "stream": True, "max_tokens": arguments.tokens})
        until(lambda: listens(port), "the bare application does not listen")
        api = psutil.Process(server.pid)
        redis_process = psutil.Process(redis.process.pid)
        rounds: list[dict[str, Any]] = []
        for _ in range(arguments.rounds):
            one = {"bare": measured([bare], port, [["/", "{}"]] * arguments.streams, directory)}
            asked = [[f"/v1/sessions/{session}/questions", body] for session in sessions]
            one["fleet"] = measured([api, worker, redis_process], int(server.url.rpartition(":")[2]), asked, directory)
            one["ratio"] = one["fleet"]["cpu_us"][0] / one["bare"]["cpu_us"][0]
            command = [*PARTS, "client", redis.url, str(arguments.streams)]
            alone = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
            one["client"] = json.loads(alone.stdout.splitlines()[-1])
            rounds.append(one)
            print(json.dumps(one), file=sys.stderr)
        return summary(rounds, arguments)


def summary(rounds: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    expected = {"each": [arguments.tokens], "whole": arguments.streams}
    for one in rounds:
        for kind in ("bare", "fleet"):
            assert all(one[kind][name] == value for name, value in expected.items()), f"tokens were lost: {one}"

    def median(kind: str, name: str) -> float:
        return statistics.median(one[kind][name] for one in rounds)

    def cpu(kind: str, place: int) -> float:
        return statistics.median(one[kind]["cpu_us"][place] for one in rounds)

    return {
        "streams": arguments.streams,
        "tokens_per_s": round(median("fleet", "tokens_per_s")),
        "events_per_token": round(
            statistics.median(one["fleet"]["events"] / one["fleet"]["tokens"] for one in rounds), 2
        ),
        "gap_p50_ms": round(median("fleet", "gap_p50_s") * 1e3, 1),
        "gap_p99_ms": round(median("fleet", "gap_p99_s") * 1e3, 1),
        "bare_gap_p99_ms": round(median("bare", "gap_p99_s") * 1e3, 1),
        "api_cpu_us_per_token": cpu("fleet", 0),
        "bare_cpu_us_per_token": cpu("bare", 0),
        "ratio": round(statistics.median(one["ratio"] for one in rounds), 2),
        "client_cpu_us_per_token": round(statistics.median(one["client"]["cpu_us"] for one in rounds), 1),
        "worker_cpu_us_per_token": cpu("fleet", 1),
        "redis_cpu_us_per_token": cpu("fleet", 2),
    }


def first_token_ms(server: Server, session: str) -> float:
    started = time.perf_counter()
    with server.streaming(session) as response:
        first = 0.0
        for event in events_of(response):
            if event.name == "token" and not first:
                first = time.perf_counter()
    assert first, "no token came"
    return (first - started) * 1e3


def first_tokens(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Single questions, to a server with an engine of its own and to one with a worker, in turns."""
    fake = {"fake_script": [*b"~ab ~ab ", 256]}
    with ExitStack() as stack:
        redis = RedisServer(directory)
        stack.callback(redis.kill)
        fleet = {"fleet_url": redis.url} | QUIET
        stack.enter_context(WorkerProcess(directory / "worker", fake=fake, **fleet))
        servers = [
            stack.enter_context(Server(directory / "single", fake=fake, **QUIET)),
            stack.enter_context(Server(directory / "fleet", engine="fake", **fleet)),
        ]
        sessions = [server.session(server.ready(TEXT)["id"]) for server in servers]
        times: list[list[float]] = [[], []]
        for n in range(arguments.questions + 3):
            for place in (0, 1) if n % 2 else (1, 0):
                took = first_token_ms(servers[place], sessions[place])
                if n >= 3:
                    times[place].append(took)
        single, through = (statistics.median(each) for each in times)
    return {
        "questions": arguments.questions,
        "single_node_ms": round(single, 1),
        "fleet_ms": round(through, 1),
        "added_ms": round(through - single, 1),
    }


def section(found: dict[str, dict[str, float]]) -> str:
    """For docs/performance.md, of what `main` found."""
    relayed, first = found["relay"], found["first_token"]
    rows = [
        (
            "tokens relayed",
            f"{relayed['tokens_per_s']:,.0f} tok/s",
            f"{relayed['events_per_token']:.2f} events a token",
            "",
        ),
        (
            "gap between tokens, p99",
            f"{relayed['gap_p99_ms']:.0f} ms",
            f"p50 {relayed['gap_p50_ms']:.0f} ms; a bare loop's p99 {relayed['bare_gap_p99_ms']:.0f} ms",
            "",
        ),
        (
            "processor time of the API for a token",
            f"{relayed['api_cpu_us_per_token']:.0f} us",
            f"a bare ASGI loop {relayed['bare_cpu_us_per_token']:.0f} us: **{relayed['ratio']:.2f}x**",
            "under 3x",
        ),
        (
            "of it the fleet's client",
            f"{relayed['client_cpu_us_per_token']:.0f} us",
            f"worker {relayed['worker_cpu_us_per_token']:.0f} us, Redis {relayed['redis_cpu_us_per_token']:.0f} us",
            "about 40 us",
        ),
        (
            "first token, with a fleet",
            f"{first['fleet_ms']:.0f} ms",
            f"single node {first['single_node_ms']:.0f} ms: {first['added_ms']:+.0f} ms, n={first['questions']} each",
            "under +10 ms",
        ),
    ]
    return "\n".join(
        [
            "## Tokens of a fleet (`benchmarks/relay.py`)",
            "",
            f"{machine()}. {relayed['streams']} streams at once, fake engine; one API process, one worker and Redis "
            "on the same cores; medians of rounds in turns.",
            "",
            table(("what", "figure", "beside it", "target"), rows),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="write docs/performance.md from this file, measure nothing")
    arguments = parser.parse_args()
    if arguments.page:
        write_section("relay", section(json.loads(arguments.page.read_text())))
        return
    with tempfile.TemporaryDirectory() as name:
        (directory := Path(name)).mkdir(exist_ok=True)
        found = {"relay": relay(arguments, directory), "first_token": first_tokens(arguments, directory)}
    print(json.dumps(found, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
