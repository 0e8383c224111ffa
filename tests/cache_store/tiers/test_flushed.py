"""A Redis that is emptied at the wrong moment: nothing is lost by it, since nothing is only there."""

from pathlib import Path

import pytest

from cache_store.area import Removed
from cache_store.keys import SnapshotKey
from cache_store.tiers.errors import TierDown
from cache_store.tiers.object import ObjectTier
from cache_store.tiers.redis import RedisTier
from tests.cache_store.recipes import Recipe
from tests.cache_store.tiers.conftest import MakeStore
from tests.cache_store.tiers.servers import RedisServer


@pytest.fixture
def redis(redis_server: RedisServer) -> RedisTier:
    return RedisTier(redis_server.url)


@pytest.fixture
def far(tmp_path: Path) -> ObjectTier:
    return ObjectTier(f"file://{tmp_path}/objects")


def flush(server: RedisServer) -> None:
    client = server.client()
    client.flushall()
    client.close()


def test_while_a_document_is_built(
    redis: RedisTier, far: ObjectTier, redis_server: RedisServer, make_store: MakeStore, recipe: Recipe
) -> None:
    store = make_store([redis, far])
    with recipe.begin(store) as builder:
        builder.append(recipe.blocks[0])
        flush(redis_server)
        builder.append(recipe.blocks[1])
    with recipe.begin(make_store([redis, far])) as builder:
        assert builder.n_blocks_done == 2
        for records in recipe.blocks[2:]:
            builder.append(records)
        flush(redis_server)
        builder.publish()
    assert store.uploader.send_noted() == 0
    for tiers in ([redis], [far]):
        assert recipe.read(make_store(tiers, f"only {tiers[0].name}")) == recipe.blocks


def test_while_it_is_sent(
    redis: RedisTier, far: ObjectTier, redis_server: RedisServer, make_store: MakeStore, recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Half a copy is none: the object store's is brought, and Redis gets a whole one then."""
    store = make_store([redis, far])
    recipe.build(store)
    publish = redis._publish

    def emptied_before(*arguments: str) -> None:
        flush(redis_server)
        publish(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(redis, "_publish", emptied_before)
        assert store.uploader.send_noted() == 1, "it is noted still"
    other = make_store([redis, far], "b")
    with other.open(recipe.key, recipe.fingerprint, recipe.layout) as reader:
        assert reader.source == "object"
    assert store.uploader.send_noted() == 0
    assert recipe.read(make_store([redis], "c")) == recipe.blocks


def test_while_it_is_restored(
    redis: RedisTier, far: ObjectTier, redis_server: RedisServer, make_store: MakeStore, recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Between the manifest, which was there, and the bytes, which are not."""
    recipe.build(store := make_store([redis, far]))
    store.uploader.send_noted()
    read = redis.read

    def emptied_before(*arguments: object) -> int:
        flush(redis_server)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(redis, "read", emptied_before)
    other = make_store([redis, far], "b")
    with other.open(recipe.key, recipe.fingerprint, recipe.layout) as reader:
        assert reader.source == "object"
    assert recipe.read(other) == recipe.blocks


def test_notes_of_deletions_are_on_the_disk(
    redis: RedisTier, far: ObjectTier, redis_server: RedisServer, make_store: MakeStore, recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The object store was away when a document was deleted, and Redis forgets everything before it is back."""

    def away(key: SnapshotKey) -> Removed:
        raise TierDown("away")

    recipe.build(store := make_store([redis, far]))
    store.uploader.send_noted()
    with monkeypatch.context() as patch:
        patch.setattr(far, "remove", away)
        store.delete(recipe.key)
    flush(redis_server)
    again = make_store([redis, far])
    assert again.n_to_remove == len((recipe.key, *recipe.key.made))
    assert again.finish_removals() == 0
    assert list(far.entries()) == []
