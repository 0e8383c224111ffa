"""One API process and workers as real processes, over a real Redis: workers killed, frozen, drained."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cache_store.tiers.servers import RedisServer
from tests.e2e.fleet import WorkerProcess
from tests.e2e.server import Server

TEXT = b"The keeper of the lighthouse is Marta Kovalenko. " * 20
SCRIPT = [*b"one two three four five six seven eight nine ten.", 256]
HEARTBEAT_S = 0.3


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


def test_a_server_without_an_engine_answers_through_a_worker(redis: RedisServer, tmp_path: Path):
    shared = {"fleet_url": redis.url, "fleet_heartbeat_s": HEARTBEAT_S}
    with WorkerProcess(tmp_path / "worker", **shared) as worker:
        with Server(tmp_path / "api", engine="fake", **shared) as server:
            with pytest.raises(AssertionError, match="no engine process"):
                server.engine()
            document = server.ready(TEXT)
            session = server.session(document["id"])
            assert server.ask(session)["answer"] == "This is the fake engine: it has no model."
            assert (tmp_path / "worker" / "store").exists()
        assert worker.stop() == 0
