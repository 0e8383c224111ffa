"""What is still to be done in the tiers: removals that are refused, and notes that were not finished."""

import errno
import os
import subprocess
from pathlib import Path

import pytest
from redis.exceptions import OutOfMemoryError

from cache_store.area import Removed
from cache_store.errors import SnapshotMiss, StorageFailed
from cache_store.keys import SnapshotKey
from cache_store.tiers.errors import TierRefused
from cache_store.tiers.memory import MemoryTier
from cache_store.tiers.redis import RedisTier
from tests.cache_store.recipes import KEY, RESIDENT, Recipe
from tests.cache_store.tiers.conftest import MakeStore
from tests.cache_store.tiers.servers import RedisServer


@pytest.fixture
def far() -> MemoryTier:
    return MemoryTier("far", durable=True)


def test_a_full_redis_lets_go_of_what_is_deleted(
    redis_server: RedisServer, make_store: MakeStore, recipe: Recipe
) -> None:
    tier = RedisTier(redis_server.url)
    store = make_store([tier])
    recipe.build(store)
    assert store.uploader.send_noted() == 0
    client = redis_server.client()
    try:
        client.config_set("maxmemory", 1)
        with pytest.raises(OutOfMemoryError):
            client.set("others", "x")
        removed = store.delete_by_tier(recipe.key)
        assert removed["redis"].objects == 1
        assert removed["redis"].nbytes > 0
        assert client.keys("*") == []
        assert store.n_to_remove == 0
    finally:
        client.config_set("maxmemory", 0)
        client.close()
        tier.close()


def test_a_tier_that_refuses_a_removal_is_asked_again(make_store: MakeStore, recipe: Recipe) -> None:
    class Stubborn(MemoryTier):
        refuses = True

        def remove(self, key: SnapshotKey) -> Removed:
            if self.refuses:
                raise TierRefused("no room for a removal")
            return super().remove(key)

    tier = Stubborn()
    store = make_store([tier])
    recipe.build(store)
    assert store.uploader.send_noted() == 0
    assert store.delete_by_tier(recipe.key)["disk"].objects > 0
    assert store.finish_removals() == store.n_to_remove > 0
    with pytest.raises(SnapshotMiss):
        recipe.read(store)
    tier.refuses = False
    assert store.finish_removals() == 0
    assert list(tier.entries()) == []


def test_a_note_that_was_not_finished_is_swept_away(tmp_path: Path, make_store: MakeStore, far: MemoryTier) -> None:
    store = make_store([far])
    Recipe().build(store)
    far.down = True
    store.delete_by_tier(RESIDENT.key.of_kind("turn"))
    notes = tmp_path / "a" / "far"
    finished = sorted(path for path in notes.rglob("*") if path.is_file())
    assert {path.parent.parent.name for path in finished} >= {"uploads"}
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    for path in finished:
        path.with_name(f"{path.name}.{gone.pid}-1").touch()
    mine = finished[0].with_name(f"{finished[0].name}.{os.getpid()}-1")
    mine.touch()
    assert sorted(store.sweep().removed_names) == sorted(f"{path.name}.{gone.pid}-1" for path in finished)
    assert sorted(path for path in notes.rglob("*") if path.is_file()) == sorted([*finished, mine])
    os.utime(mine, (0, 0))
    assert store.sweep().removed_names == [mine.name]
    assert store.n_to_send == 1
    assert store.n_to_remove > 0


def test_a_note_that_the_disk_refuses_leaves_nothing(
    tmp_path: Path, make_store: MakeStore, far: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = make_store([far])
    with monkeypatch.context() as full:
        full.setattr(os, "rename", refuse)
        with pytest.raises(StorageFailed):
            store.delete_by_tier(KEY)
    assert [path for path in (tmp_path / "a" / "far").rglob("*") if path.is_file()] == []
