import logging
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

import service.engine.models.light_transformers  # noqa: F401 - before a test's own import of transformers
from service.settings import Settings
from tests.cache_store.tiers.servers import RedisServer
from tests.postgres import PostgresServer
from tests.service.engine.exl2_engine.interpreted import use_interpreter

# The same examples each time, however long they take on a machine that does other work: `make fuzz` looks for new ones.
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")
use_interpreter()  # here, because whatever imports transformers may import triton


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: workers that share the files then end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The imported demo model: `PREREAD_TEST_MODEL`, else where `preread serve` finds it."""
    directory = Path(os.environ.get("PREREAD_TEST_MODEL") or Settings().model_dir)
    if not (directory / "preread.json").is_file():
        pytest.fail(f"{directory} is not an imported model: run `make model`, or deselect with -m 'not model'")
    return directory


@pytest.fixture(scope="session")
def postgres_session() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture
def postgres(postgres_session: PostgresServer) -> Iterator[PostgresServer]:
    """A PostgreSQL that a test may kill or freeze."""
    yield postgres_session
    if postgres_session.process.poll() is None:
        postgres_session.thaw()
    else:
        postgres_session.start()


@pytest.fixture(scope="session")
def redis_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis_server(redis_session: RedisServer) -> RedisServer:
    """An empty Redis, which a test leaves running."""
    client = redis_session.client()
    client.flushall()
    client.close()
    return redis_session


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'a.sqlite3'}"
    return request.getfixturevalue("postgres").new_database()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A test that sets up logging, as a server or the parser does, does so for itself alone."""
    root = logging.getLogger()
    handlers, level, disabled = root.handlers[:], root.level, root.manager.disable
    off = {name for name, logger in root.manager.loggerDict.items() if getattr(logger, "disabled", False)}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.disable(disabled)
    for name, logger in root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger):
            logger.disabled = name in off
