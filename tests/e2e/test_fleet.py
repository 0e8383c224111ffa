"""An API process and workers, each a real process, over a real Redis: workers killed, frozen, told to stop."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from service.cli import main
from tests.cache_store.tiers.servers import RedisServer
from tests.e2e.fleet import WorkerProcess
from tests.e2e.server import Server, until
from tests.e2e.sse import Event, events_of, text_of

TEXT = b"The keeper of the lighthouse is Marta Kovalenko. " * 20
WORDS = " ".join(f"w{n}" for n in range(40))
FAKE = {"fake_script": [*WORDS.encode(), 256], "fake_step_s": 0.02}
HEARTBEAT_S = 0.7
ENGINE_TIMEOUT_S = 4.0


@pytest.fixture(scope="module")
def shared(redis: RedisServer) -> dict[str, Any]:
    return {
        "fleet_url": redis.url,
        "fleet_heartbeat_s": HEARTBEAT_S,
        "worker_grace_s": 20,
        "engine_timeout_s": ENGINE_TIMEOUT_S,
    }


def test_a_server_without_an_engine_answers_through_a_worker(shared: dict[str, Any], tmp_path: Path):
    """No part of it is a test's own: the commands, and the environment."""
    with WorkerProcess(tmp_path / "worker", **shared) as worker:
        with Server(tmp_path / "api", engine="fake", sweep_interval_s=0.3, **shared) as server:
            with pytest.raises(AssertionError, match="no engine process"):
                server.engine()
            document = server.ready(TEXT)
            assert server.ask(server.session(document["id"]))["answer"] == "This is the fake engine: it has no model."
            assert server.get("/health/ready").json()["engine"] == "fake"
            stored = worker.data_dir / "store" / "snapshots"
            assert list(stored.glob("*/documents/*"))
            assert list(stored.glob("*/turns/*"))
            stays_while_it_is_pinned(server, worker, document["id"])
            assert server.request("DELETE", f"/v1/documents/{document['id']}").status_code == 200
            assert not list(stored.glob("*/documents/*"))
            assert not list(stored.glob("*/turns/*"))
            later = server.ready(TEXT)["id"]
            assert list(stored.glob("*/documents/*"))
            assert server.request("PATCH", f"/v1/documents/{later}", json={"ttl_s": 1}).status_code == 200
            until(lambda: not list(stored.glob("*/documents/*")), "what is past its time stays on the worker's disk")
        assert worker.stop() == 0


def stays_while_it_is_pinned(server: Server, worker: WorkerProcess, document_id: str) -> None:
    """What is pinned through the API is not evicted from the worker's disk, though nobody has asked about it since."""
    for pinned in (True, False, True):
        assert server.request("PATCH", f"/v1/documents/{document_id}", json={"pinned": pinned}).status_code == 200
        marks = list((worker.data_dir / "store" / "pins").iterdir())
        assert [document_id in mark.name for mark in marks] == [True] * pinned
    command = ["snapshots", "evict", "--bytes", str(1 << 40)]
    evicted = CliRunner().invoke(main, command, env={"PREREAD_DATA_DIR": str(worker.data_dir)})
    assert f"document {document_id}: stays (pinned)" in evicted.stdout
    assert list((worker.data_dir / "store" / "snapshots").glob(f"*/documents/{document_id}"))


def asked(server: Server, session: str) -> dict[str, Any]:
    """The answer, asked for until there is one: only errors that say so may come before."""

    def attempt() -> dict[str, Any] | None:
        response = server.question(session)
        if response.status_code == 200:
            return response.json()
        assert response.status_code == 503, response.text
        assert int(response.headers["retry-after"]) >= 1
        return None

    return until(attempt, "the question is not answered", every_s=0.2)


def broken(server: Server, session: str, fault: Callable[[], object]) -> list[Event]:
    """The events of an answer that began before a fault."""
    with server.streaming(session) as response:
        arriving = events_of(response)
        seen = [next(arriving) for _ in range(3)]
        fault()
        return [*seen, *arriving]


def is_told(events: list[Event]) -> bool:
    """Whether an answer was lost, and its reader told to ask again, after nothing but a beginning of it."""
    return events[-1].name == "error" and events[-1].data["retryable"] and WORDS.startswith(text_of(events))


@pytest.mark.timeout(300)
def test_workers_are_killed_frozen_and_stopped(redis: RedisServer, shared: dict[str, Any], tmp_path: Path):
    with WorkerProcess(tmp_path / "w1", fake=FAKE, **shared) as one:
        with Server(tmp_path / "api", engine="fake", **shared) as server:
            session = server.session(server.ready(TEXT)["id"])
            assert asked(server, session)["answer"] == WORDS

            assert is_told(broken(server, session, lambda: freeze_past_heartbeat(one)))
            assert asked(server, session)["answer"] == WORDS
            assert "too late" in one.log()

            assert is_told(broken(server, session, lambda: (redis.kill(), redis.start())))
            assert asked(server, session)["answer"] == WORDS

            hung = one.engine()
            assert is_told(broken(server, session, hung.suspend))
            assert asked(server, session)["answer"] == WORDS
            assert not hung.is_running(), "the engine was killed, and its worker was not"
            assert f"said nothing for {ENGINE_TIMEOUT_S:g} s" in one.log()

            with WorkerProcess(tmp_path / "w2", fake=FAKE, **shared) as two:
                assert is_told(broken(server, session, one.kill))
                again = asked(server, session)
                assert again["answer"] == WORDS
                assert again["cache"]["miss_reason"] == "absent", "there is no tier: the other worker reads it again"

                statuses: list[int] = []
                events = broken(server, session, lambda: stop_in_the_background(two, statuses))
                assert text_of(events) == WORDS
                assert events[-1].name == "done"
                until(lambda: statuses, "the worker does not end")
                assert statuses == [0]
            assert server.question(session).status_code == 503

            with one:
                assert asked(server, session)["cache"]["source"] == "disk"


def freeze_past_heartbeat(worker: WorkerProcess) -> None:
    worker.freeze()
    time.sleep(HEARTBEAT_S * 5)
    worker.thaw()


def stop_in_the_background(worker: WorkerProcess, statuses: list[int]) -> None:
    threading.Thread(target=lambda: statuses.append(worker.stop()), daemon=True).start()
