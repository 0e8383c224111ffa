"""Two API processes and a worker over a real PostgreSQL and a real Redis; the API processes are killed."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from service.db.migrations import upgrade
from tests.cache_store.tiers.servers import RedisServer
from tests.e2e.fleet import WorkerProcess
from tests.e2e.server import Server, until
from tests.postgres import PostgresServer

TEXT = "The keeper of the lighthouse is Marta Kovalenko. " * 50
LEASE_S = 1.0
SLOW = {"fake_layer_s": 0.1, "fake_step_s": 0.02}


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
    shared = {"fleet_url": redis.url, "fleet_heartbeat_s": 0.3}
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


def test_a_document_is_prefilled_once_though_uploaded_at_both_and_its_reader_is_killed(two: list[Server]):
    one, other = two
    before = prefilled(other)
    files = {"file": ("document.txt", TEXT.encode())}
    with ThreadPoolExecutor() as pool:
        responses = list(pool.map(lambda server: server.request("POST", "/v1/documents", files=files), two * 3))
    (document_id,) = {response.json()["id"] for response in responses}
    (owner,) = (n for n, response in enumerate(responses) if response.status_code == 202)
    if owner % 2:
        one, other = other, one
    until(lambda: other.document(document_id)["status"] == "prefilling", "it is not read")
    until(lambda: other.document(document_id)["progress"]["done"] > 0, "no progress at the other")
    one.kill()
    body = other.until_ended(document_id)
    assert body["status"] == "ready"
    until(lambda: prefilled(other) - before == body["token_count"], "the tokens were not prefilled once", 10)
