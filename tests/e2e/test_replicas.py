"""Two API processes and a worker over a real PostgreSQL and a real Redis; the API processes are killed."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from service.db.migrations import upgrade
from tests.cache_store.tiers.servers import RedisServer
from tests.e2e.fleet import WorkerProcess
from tests.e2e.server import Server, until
from tests.e2e.sse import Event, events_of, last_of, text_of
from tests.postgres import PostgresServer

TEXT = "The keeper of the lighthouse is Marta Kovalenko. " * 100
LEASE_S = 2.0
HEARTBEAT_S = 0.3
ANSWER = "".join(f"word{n} " for n in range(30))
SLOW = {"fake_layer_s": 0.2, "fake_step_s": 0.02, "fake_script": [*ANSWER.encode(), 256]}


class Replicas:
    """`one` and `other` are API processes over one database and one folder; either may be killed."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.servers = [
            Server(directory / "api", name=name, engine="fake", lease_s=LEASE_S, **settings) for name in ("-a", "-b")
        ]

    def __enter__(self) -> "Replicas":
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.alive or server.start(), self.servers))
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.stop()


@pytest.fixture(scope="module")
def installation(
    postgres_session: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Replicas, WorkerProcess]]:
    directory = tmp_path_factory.mktemp("replicas")
    redis = RedisServer(directory)
    url = postgres_session.new_database()
    asyncio.run(upgrade(url))
    shared = {"fleet_url": redis.url, "fleet_heartbeat_s": HEARTBEAT_S}
    with WorkerProcess(directory / "worker", fake=SLOW, **shared) as worker:
        with Replicas(directory, database_url=url, **shared) as replicas:
            yield replicas, worker
    redis.kill()


@pytest.fixture
def two(installation: tuple[Replicas, WorkerProcess]) -> list[Server]:
    with ThreadPoolExecutor() as pool:  # one may have been killed by the test before
        list(pool.map(lambda server: server.alive or server.start(), installation[0].servers))
    return installation[0].servers


def prefilled(server: Server) -> float:
    return server.engine_stat("document_prefill_tokens_total")


def prefilled_so_far(server: Server) -> float:
    """Once several heartbeats have told the same: each tells what was counted before it."""
    last, since = prefilled(server), time.monotonic()
    while time.monotonic() < since + 5 * HEARTBEAT_S:
        time.sleep(HEARTBEAT_S / 3)
        if (now := prefilled(server)) != last:
            last, since = now, time.monotonic()
    return last


def followed(server: Server, path: str, last_event_id: str = "0") -> list[Event]:
    """All events of an answer after an id, as a server gives them."""
    with server.client.stream("GET", path, headers={"Last-Event-ID": last_event_id}) as response:
        assert response.status_code == 200, response.read()
        return list(events_of(response))


def test_what_is_deleted_at_one_is_answered_about_nowhere(two: list[Server]):
    one, other = two
    document = one.ready(b"The keeper is Olena Bondar. " * 5)["id"]
    session = one.session(document)
    with one.streaming(session) as response:
        path, events = response.headers["Location"], events_of(response)
        first = next(event for event in events if event.name == "token")
        assert other.request("DELETE", f"/v1/documents/{document}").status_code == 200
        assert len(first.data["text"] + text_of(list(events))) < len(ANSWER)
    for server in two:
        assert server.get(path).status_code == 404
        assert server.question(session).status_code == 404


def test_the_work_of_a_killed_process_is_taken_up_by_the_other(two: list[Server]):
    """A document that both were given at once is prefilled once; of an answer no token is lost or doubled."""
    one, other = two
    files = {"file": ("document.txt", TEXT.encode())}
    asked = one.ready(b"The keeper is Marta Kovalenko. " * 5)
    before = prefilled_so_far(other)
    session = one.session(asked["id"])
    with ThreadPoolExecutor() as pool:
        responses = list(pool.map(lambda server: server.request("POST", "/v1/documents", files=files), two * 3))
    (document_id,) = {response.json()["id"] for response in responses}
    (owner,) = (n for n, response in enumerate(responses) if response.status_code == 202)
    if owner % 2:
        one, other = other, one
    until(lambda: other.document(document_id)["progress"]["done"] > 0, "no progress at the other")
    seen: list[Event] = []
    with one.streaming(session) as response:
        path = response.headers["Location"]
        for event in events_of(response):
            seen.append(event)
            if len(text_of(seen)) > 5:
                break
        one.kill()
    assert other.document(document_id)["status"] == "prefilling"
    rest = followed(other, path, seen[-1].id)
    assert text_of(seen) + text_of(rest) == ANSWER
    assert last_of(rest, "done")["answer"] == ANSWER
    (turn,) = other.turns(session)
    assert (turn["status"], turn["answer"]["answer"]) == ("done", ANSWER)
    again = followed(other, path)
    assert (text_of(again), again[-1]) == (ANSWER, rest[-1])
    assert other.ask(session)["usage"]["reused_tokens"] > turn["answer"]["usage"]["reused_tokens"]
    body = other.until_ended(document_id)
    assert body["status"] == "ready"
    n_tokens = before + body["token_count"]
    until(lambda: prefilled(other) == n_tokens, "the tokens were not prefilled once")


def test_a_stopped_process_hands_its_answers_over(two: list[Server]):
    one, other = two
    session = one.session(one.ready(b"The keeper is Ilya Marchenko. " * 5)["id"])
    with one.streaming(session) as response:
        path = response.headers["Location"]
        first = next(event for event in events_of(response) if event.name == "token")
        with ThreadPoolExecutor() as pool:
            stopped = pool.submit(one.stop)
            rest = followed(other, path, first.id)
            stopped.result()
    assert first.data["text"] + text_of(rest) == ANSWER
    assert last_of(rest, "done")["answer"] == ANSWER
