"""A store whose disk can be lost, and tiers of every kind beyond it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache_store.tiers.memory import MemoryTier
from cache_store.tiers.object import ObjectTier
from cache_store.tiers.redis import RedisTier
from cache_store.tiers.store import TieredStore
from cache_store.tiers.tier import BlobTier
from tests.cache_store.tiers.servers import S3Server

MakeStore = Callable[..., TieredStore]


@pytest.fixture(scope="session")
def s3_session() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_session: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in s3_session.environment.items():
        monkeypatch.setenv(name, value)
    s3_session.clear()
    return s3_session


@pytest.fixture(params=["memory", "redis", "path", "s3"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobTier]:
    match request.param:
        case "memory":
            made: BlobTier = MemoryTier()
        case "redis":
            made = RedisTier(request.getfixturevalue("redis_server").url)
        case "path":
            made = ObjectTier(f"file://{tmp_path}/objects")
        case _:
            made = ObjectTier(request.getfixturevalue("s3").url)
    yield made
    made.close()


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[MakeStore]:
    """Stores of several hosts: `make_store(tiers, "b")`; nothing is sent but by `uploader.send_noted`."""
    made: list[TieredStore] = []

    def make(tiers: list[BlobTier], host: str = "a", **options: object) -> TieredStore:
        made.append(TieredStore(tmp_path / host, tiers, **{"uploads": False} | options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for store in made:
        store.close()
