"""Servers in processes of their own, and what they said when a test fails."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cache_store.tiers.servers import RedisServer, S3Server
from tests.e2e.server import Server


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers, each over a data directory of its own; they are stopped after the test."""
    with ExitStack() as stack:
        yield _starter(tmp_path, stack)


@pytest.fixture(scope="module")
def serve_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts servers that all tests of a module share."""
    with ExitStack() as stack:
        yield _starter(tmp_path_factory.mktemp("shared"), stack)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A module's own, which its tests may kill and start again."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """A module's own, with all that its servers need in the environment."""
    server = S3Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
    server.close()


def _starter(directory: Path, stack: ExitStack) -> Callable[..., Server]:
    def start(**options: Any) -> Server:
        data_dir = directory / f"server-{next(numbers)}" / "data"
        data_dir.parent.mkdir()
        return stack.enter_context(Server(data_dir, **options))

    numbers = itertools.count()
    return start


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Append the end of every running server's log to a failure."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed:
        for server in Server.running:
            report.sections.append((f"log of {server.log_path}", server.tail()))
