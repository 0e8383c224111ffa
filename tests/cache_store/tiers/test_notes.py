"""What is still to be done in the tiers: removals that are refused, and notes that were not finished."""

import errno
import os
import subprocess
import time
from pathlib import Path

import pytest
from redis.exceptions import OutOfMemoryError

from cache_store.area import Removed
from cache_store.errors import SnapshotMiss, StorageFailed
from cache_store.keys import EntryName, SnapshotKey, flat_key
from cache_store.tiers.errors import TierRefused
from cache_store.tiers.memory import MemoryTier
from cache_store.tiers.notes import Notes
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


def test_a_note_that_did_not_reach_the_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes(tmp_path)
    synced: list[str] = []

    def sync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        if synced[-1] == str(tmp_path / "far" / "removals"):
            raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", sync)
    name = EntryName(KEY, "0" * 16)
    notes.ask_upload(name, ["far"])
    noted = tmp_path / "far" / "uploads" / flat_key(KEY)
    assert synced[0].startswith(f"{noted}/{name.fingerprint_digest}.")  # before it gets its name
    assert synced[1:] == [str(noted), str(noted.parent)]
    with pytest.raises(StorageFailed, match="making a note of a tier"):
        notes.ask_removal(KEY, "far")
    assert notes.is_removed(KEY, "far")  # it may be there after all, and counts


def test_placed_copies_are_known_since_a_time(tmp_path: Path) -> None:
    notes, name = Notes(tmp_path), EntryName(KEY, "0" * 16)
    before = int(time.time())
    notes.uploaded(name, "redis")
    place = tmp_path / "far" / "placed" / flat_key(KEY) / name.fingerprint_digest
    place.write_text("redis 1000\nobject\n")  # the second as an earlier version wrote it
    os.utime(place, (2000, 2000))
    assert notes.known_at(KEY) == {"redis": 1000, "object": 2000}
    notes.uploaded(name, "object")
    assert notes.known_at(KEY)["redis"] == 1000
    assert notes.known_at(KEY)["object"] >= before
    assert notes.placed(name) == ["redis", "object"]
    notes.not_placed(name, "redis")
    assert list(notes.known_at(KEY)) == ["object"]


def test_a_tier_that_was_emptied_is_noticed_when_it_is_asked(
    make_store: MakeStore, recipe: Recipe, far: MemoryTier
) -> None:
    store = make_store([far])
    recipe.build(store)
    store.uploader.send_noted()
    assert store.far_places(recipe.key) == {"far": "ready"}
    far.remove(recipe.key)
    store.evict(recipe.key)
    with pytest.raises(SnapshotMiss):
        recipe.read(store)
    assert store.far_places(recipe.key) == {}
