"""What faults are made with does what it says: a clock that is moved, connections that break, figures that add up."""

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos.asking import Seen
from tests.chaos.chaos import Tally
from tests.chaos.clocks import MovableClock
from tests.chaos.report import added, merged, row_of, save
from tests.chaos.wire import Wire

ASK = "import sys, time\nfor line in sys.stdin: print(time.time(), time.time_ns(), time.monotonic(), flush=True)"


def test_a_clock_is_moved_in_a_running_process(tmp_path: Path) -> None:
    clock = MovableClock(tmp_path / "clock")
    command = [sys.executable, "-c", ASK]
    with subprocess.Popen(
        command, env=os.environ | clock.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        for hours in (0, 50, -50, 0):
            clock.set(hours * 3600)
            process.stdin.write("\n")
            process.stdin.flush()
            seconds, nanoseconds, monotonic = map(float, process.stdout.readline().split())
            assert abs(seconds - time.time() - hours * 3600) < 60
            assert abs(nanoseconds / 1e9 - seconds) < 60
            assert abs(monotonic - time.monotonic()) < 60
        process.stdin.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Before a server that says what it is told."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=_echo, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    wire = Wire(server.getsockname()[1])
    yield wire
    wire.close()
    server.close()


def _echo(connection: socket.socket) -> None:
    with connection, suppress(OSError):
        while data := connection.recv(1000):
            connection.sendall(data)


def _read_to_the_end(client: socket.socket) -> None:
    """Some of the half of a reply may come before the reset."""
    while client.recv(10) in (b"1234", b""):
        pass


def test_bytes_pass_and_wait(wire: Wire) -> None:
    with socket.create_connection(("127.0.0.1", wire.port), timeout=60) as client:
        client.sendall(b"hello")
        assert client.recv(10) == b"hello"
        wire.set("stall")
        client.sendall(b"again")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(10)
        client.settimeout(60)
        wire.set("")
        assert client.recv(10) == b"again"


def test_a_reply_is_cut_and_the_connection_reset(wire: Wire) -> None:
    with socket.create_connection(("127.0.0.1", wire.port), timeout=60) as client:
        wire.set("reset")
        client.sendall(b"12345678")
        with pytest.raises(ConnectionResetError):
            _read_to_the_end(client)
    assert wire.n_faults


def test_connections_are_refused_for_a_while(wire: Wire) -> None:
    with socket.create_connection(("127.0.0.1", wire.port), timeout=60) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        wire.set("refuse")
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", wire.port), timeout=60)
    wire.set("")
    with socket.create_connection(("127.0.0.1", wire.port), timeout=60) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"x"


def test_figures_of_several_runs_add_up() -> None:
    seen = Seen(Counter({"503 engine_lost": 2, "stream: engine_lost": 1}), 10, 3.0)
    once = Tally(2, 1, 20.0, seen)
    row = row_of("kill_redis", once)
    twice = row_of("kill_redis", added(Tally(2, 0, 30.0, Seen(Counter({"503 engine_lost": 1}), 12, 4.0)), row))
    assert twice[2:] == ["4", "22", "3 × 503 engine_lost, 1 × stream: engine_lost", "1", "4.0 s", "12.5 s"]
    assert row_of("kill_redis", Tally(1, 0, 1.0))[4] == "nothing"


def test_what_several_runs_saved_adds_up(tmp_path: Path) -> None:
    run = argparse.Namespace(model="", stall=3.0, apis=2, workers=2, json=tmp_path / "seen.jsonl")
    seen = Seen(Counter({"503 engine_lost": 1}), 6, 2.0)
    save("kill_redis", Tally(1, 0, 10.0, seen), run)
    save("kill_api", Tally(0, 0, 5.0, failure="a wrong answer"), run)
    run.stall = 30.0
    save("kill_redis", Tally(1, 1, 40.0, seen), run)
    run.stall = 3.0
    save("kill_redis", Tally(2, 0, 20.0, seen), run)
    found = {key[::2]: tally for key, tally in merged(run.json.read_text().splitlines()).items()}
    redis = found["faults", "kill_redis"]
    assert (redis.n_rounds, redis.seconds, redis.seen) == (3, 30.0, Seen(Counter({"503 engine_lost": 2}), 12, 2.0))
    assert found["faults of 30 s", "kill_redis"].n_read_again == 1
    assert found["faults", "kill_api"].failure == "a wrong answer"
