"""A store with tiers beyond its disk: what is sent, brought, refused, and removed everywhere."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache_store.errors import BudgetExceeded, MissReason, SnapshotMiss
from cache_store.keys import EntryName, SnapshotKey
from cache_store.speeds import PREFILL, Speed
from cache_store.tiers.breaker import GuardedTier
from cache_store.tiers.errors import TierDown
from cache_store.tiers.memory import MemoryTier
from cache_store.tiers.store import TieredStore
from tests.cache_store.damage import expect_tidy, flip, shard_paths
from tests.cache_store.recipes import KEY, RESIDENT, Recipe
from tests.cache_store.tiers.conftest import MakeStore

NAME = EntryName(KEY, Recipe().fingerprint.digest)


@pytest.fixture
def near() -> MemoryTier:
    return MemoryTier("near")


@pytest.fixture
def far() -> MemoryTier:
    return MemoryTier("far", durable=True)


def test_a_snapshot_is_sent_in_the_background(tmp_path: Path, near: MemoryTier, far: MemoryTier) -> None:
    store = TieredStore(tmp_path / "a", [near, far])
    Recipe().build(store)
    until = time.monotonic() + 60
    while store.places(KEY) != {"disk": "ready", "near": "ready", "far": "ready"}:
        assert time.monotonic() < until
        time.sleep(0.01)
    store.close()
    assert set(near.copies) == set(far.copies) == {NAME}


def test_sending_waits_for_a_tier_that_is_down_and_outlives_the_process(
    make_store: MakeStore, near: MemoryTier, far: MemoryTier
) -> None:
    store = make_store([near, far])
    far.down = True
    Recipe().build(store)
    assert store.uploader.send_noted() == 1
    assert store.places(KEY) == {"disk": "ready", "near": "ready", "far": "pending"}
    far.down = False
    again = TieredStore(store.root, [near, far])
    until = time.monotonic() + 60
    while NAME not in far.copies:
        assert time.monotonic() < until
        time.sleep(0.01)
    again.close()


def test_the_durable_tier_gets_it_first(make_store: MakeStore, near: MemoryTier, far: MemoryTier) -> None:
    store = make_store([near, far])
    Recipe().build(store)
    order: list[str] = []
    for tier in (near, far):
        write = tier.write

        def noted(*arguments: Any, tier: MemoryTier = tier, write: Callable[..., None] = write) -> None:
            order.append(tier.name)
            write(*arguments)

        tier.write = noted  # type: ignore[method-assign]
    store.uploader.send_noted()
    assert order == ["far", "near"]


def test_a_copy_from_afar_is_promoted_to_what_is_nearer(
    make_store: MakeStore, near: MemoryTier, far: MemoryTier
) -> None:
    here, there = make_store([near, far], "here"), make_store([near, far], "there", uploads=True)
    Recipe().build(here)
    here.uploader.send_noted()
    near.copies.clear()
    with there.open(KEY, Recipe().fingerprint, Recipe().layout) as reader:
        assert reader.source == "far"
    until = time.monotonic() + 60
    while NAME not in near.copies:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("damage", ["bytes", "header", "tokens", "short", "manifest", "other"])
def test_a_damaged_copy_is_removed_and_the_next_tier_asked(
    make_store: MakeStore, near: MemoryTier, far: MemoryTier, damage: str
) -> None:
    here, there = make_store([near, far], "here"), make_store([near, far], "there")
    Recipe().build(here)
    here.uploader.send_noted()
    copy = near.copies[NAME]
    shard = bytearray(copy.shards[0])
    match damage:
        case "bytes":
            shard[-1] ^= 1
        case "header":
            shard[20] ^= 1
        case "tokens":
            shard[len(shard) - copy.shards[0][::-1].find(b" ") + 4] ^= 1
        case "short":
            del shard[-8:]
        case "manifest":
            copy.manifest = copy.manifest.replace(b'"n_tokens":43', b'"n_tokens":42')
        case _:
            Recipe(key=SnapshotKey("mallory", "document", "doc-1")).build(here)
            here.uploader.send_noted()
            near.copies[NAME] = next(c for n, c in near.copies.items() if n.key.owner_id == "mallory")
    if damage not in ("manifest", "other"):
        copy.shards[0] = bytes(shard)
    with there.open(KEY, Recipe().fingerprint, Recipe().layout) as reader:
        assert reader.source == "far"
        reader.verify_all()
    assert Recipe().read(there) == Recipe().blocks
    assert NAME not in near.copies
    expect_tidy(there, there.root)


def test_without_a_good_copy_it_is_a_miss_that_says_why(make_store: MakeStore, near: MemoryTier) -> None:
    here, there = make_store([near], "here"), make_store([near], "there")
    Recipe().build(here)
    here.uploader.send_noted()
    near.copies[NAME].shards[0] = bytes(len(near.copies[NAME].shards[0]))
    with pytest.raises(SnapshotMiss) as miss:
        Recipe().read(there)
    assert miss.value.reason is MissReason.ABSENT
    assert "near: shard-0000.safetensors is not the shard it should be" in miss.value.detail
    near.down = True
    with pytest.raises(SnapshotMiss, match="the near tier does not answer"):
        Recipe().read(there)
    expect_tidy(there, there.root)


def test_damage_on_the_disk_is_mended_from_a_tier(make_store: MakeStore, near: MemoryTier) -> None:
    store = make_store([near])
    Recipe().build(store)
    store.uploader.send_noted()
    flip(shard_paths(store.root, Recipe())[0], -1 + shard_paths(store.root, Recipe())[0].stat().st_size)
    with pytest.raises(SnapshotMiss):
        Recipe().read(store)
    assert Recipe().read(store) == Recipe().blocks
    assert {entry.state for entry in store.entries()} == {"published", "quarantined"}


def test_damage_on_the_disk_is_not_sent(make_store: MakeStore, near: MemoryTier) -> None:
    store = make_store([near])
    Recipe().build(store)
    flip(shard_paths(store.root, Recipe())[0], -1 + shard_paths(store.root, Recipe())[0].stat().st_size)
    assert store.uploader.send_noted() == 0
    assert near.copies == {}
    assert [entry.state for entry in store.entries()] == ["quarantined"]


def test_a_quarantined_snapshot_leaves_every_tier(make_store: MakeStore, near: MemoryTier) -> None:
    store = make_store([near])
    Recipe().build(store)
    store.uploader.send_noted()
    store.quarantine(KEY, NAME.fingerprint_digest, MissReason.CANARY, "other logits")
    assert near.copies == {}
    assert store.places(KEY) == {}


def test_what_is_deleted_while_a_tier_is_down_never_comes_back(
    make_store: MakeStore, near: MemoryTier, far: MemoryTier
) -> None:
    store = make_store([near, far])
    for recipe in (Recipe(), RESIDENT):
        recipe.build(store)
    store.uploader.send_noted()
    far.down = True
    removed = store.delete_by_tier(KEY)
    assert (removed["disk"].objects, removed["near"].objects, removed["far"].objects) == (4, 4, 0)
    far.down = False
    assert len(far.copies) == 2
    with pytest.raises(SnapshotMiss):
        Recipe().read(store)
    assert store.finish_removals() == 0
    assert far.copies == {}
    Recipe().build(store)
    assert store.uploader.send_noted() == 0
    assert set(far.copies) == {NAME}


def test_a_build_after_a_removal_that_is_still_to_be_done_is_kept(make_store: MakeStore, far: MemoryTier) -> None:
    store = make_store([far])
    Recipe(seed=1).build(store)
    store.uploader.send_noted()
    far.down = True
    store.delete(KEY)
    Recipe(seed=2, n_tokens=20).build(store)
    far.down = False
    assert store.uploader.send_noted() == 0
    assert store.finish_removals() == 0
    other = make_store([far], "other")
    assert Recipe(seed=2, n_tokens=20).read(other) == Recipe(seed=2, n_tokens=20).blocks


def test_a_deletion_while_it_is_sent_wins(make_store: MakeStore, near: MemoryTier) -> None:
    store = make_store([near])
    Recipe().build(store)
    write = near.write

    def write_slowly(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        store.delete(KEY)
        write(*arguments)  # type: ignore[arg-type]

    near.write = write_slowly  # type: ignore[method-assign, assignment]
    store.uploader.send_noted()
    assert near.copies == {}
    assert store.places(KEY) == {}


def test_a_deletion_while_it_is_brought_wins(make_store: MakeStore, near: MemoryTier) -> None:
    here, there = make_store([near], "here"), make_store([near], "there")
    Recipe().build(here)
    here.uploader.send_noted()
    read = near.read

    def read_slowly(*arguments: object) -> int:
        n = read(*arguments)  # type: ignore[arg-type]
        there.delete(KEY)
        return n

    near.read = read_slowly  # type: ignore[method-assign, assignment]
    with pytest.raises(SnapshotMiss):
        Recipe().read(there)
    assert there.entries() == []
    expect_tidy(there, there.root)


def test_several_who_ask_at_once_bring_it_once(make_store: MakeStore, near: MemoryTier) -> None:
    here, there = make_store([near], "here"), make_store([near], "there")
    Recipe().build(here)
    here.uploader.send_noted()
    n_reads: list[int] = []
    read = near.read

    def slow(*arguments: object) -> int:
        n_reads.append(1)
        time.sleep(0.1)
        return read(*arguments)  # type: ignore[arg-type]

    near.read = slow  # type: ignore[method-assign, assignment]
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(Recipe().read(there) == Recipe().blocks)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (found, len(n_reads)) == ([True] * 4, 1)


def test_other_tokens_are_not_brought_and_stay(make_store: MakeStore, near: MemoryTier) -> None:
    here, there = make_store([near], "here"), make_store([near], "there")
    Recipe().build(here)
    here.uploader.send_noted()
    with pytest.raises(SnapshotMiss, match="of other tokens"):
        there.open(KEY, Recipe().fingerprint, Recipe().layout, token_digest="another")
    assert NAME in near.copies
    assert there.usage() == 0


def test_a_full_disk_lets_go_of_what_the_durable_tier_has(
    make_store: MakeStore, near: MemoryTier, far: MemoryTier
) -> None:
    recipes = [Recipe(key=SnapshotKey("alice", "document", f"doc-{i}"), seed=i) for i in range(3)]
    size = make_store([near, far], "size")
    recipes[0].build(size)
    budget = size.usage() * 3
    store = make_store([near, far], budget_nbytes=budget)
    for recipe in recipes[:2]:
        recipe.build(store)
    store.uploader.send_noted()
    with pytest.raises(BudgetExceeded, match="larger than the whole budget"):
        Recipe(n_tokens=400).build(store)
    assert len(store.entries()) == 2
    recipes[2].build(store)
    assert store.usage() <= budget
    assert len(store.entries()) < 3
    for recipe in recipes[:2]:
        assert recipe.read(store) == recipe.blocks  # back again, in place of others
        store.uploader.send_noted()
    assert store.usage() <= budget


def test_what_leaves_a_full_disk_is_sent_first(make_store: MakeStore, near: MemoryTier, far: MemoryTier) -> None:
    recipes = [Recipe(key=SnapshotKey("alice", "document", f"doc-{i}"), seed=i) for i in range(3)]
    size = make_store([near, far], "size")
    recipes[0].build(size)
    store = make_store([near, far], budget_nbytes=size.usage() * 3)
    for recipe in recipes:
        recipe.build(store)
    gone = [recipe for recipe in recipes if "disk" not in store.places(recipe.key)]
    assert gone
    assert all(store.places(recipe.key)["far"] == "ready" for recipe in gone)
    assert {name.key for name in far.copies} == {recipe.key for recipe in gone}


def test_a_tier_that_is_down_keeps_nobody_from_writing(make_store: MakeStore, far: MemoryTier) -> None:
    recipes = [Recipe(key=SnapshotKey("alice", "document", f"doc-{i}"), seed=i) for i in range(3)]
    size = make_store([far], "size")
    recipes[0].build(size)
    store, far.down = make_store([far], budget_nbytes=size.usage() * 3), True
    for recipe in recipes:
        recipe.build(store)
    assert recipes[2].read(store) == recipes[2].blocks


def test_what_a_tier_has_leaves_before_what_it_has_lost(make_store: MakeStore, far: MemoryTier) -> None:
    recipes = [Recipe(key=SnapshotKey("alice", "document", f"doc-{i}"), seed=i) for i in range(3)]
    size = make_store([far], "size")
    recipes[0].build(size)
    store = make_store([far], budget_nbytes=size.usage() * 3)
    for recipe in recipes[:2]:
        recipe.build(store)
    store.uploader.send_noted()
    del far.copies[EntryName(recipes[0].key, recipes[0].fingerprint.digest)]
    store.used(recipes[1].key, recipes[1].fingerprint.digest)  # else it would be the other's turn anyway
    recipes[2].build(store)
    assert store.places(recipes[1].key) == {"far": "ready"}
    assert "far" not in store.places(recipes[0].key)
    assert recipes[0].read(store) == recipes[0].blocks


def test_it_is_computed_where_that_is_faster(make_store: MakeStore, near: MemoryTier) -> None:
    here, there = make_store([near], "here"), make_store([near], "there")
    Recipe().build(here)
    here.uploader.send_noted()
    now = time.time()
    there.speeds._speeds |= {PREFILL: Speed(1e6, now), "near": Speed(10.0, now)}
    with pytest.raises(SnapshotMiss, match="computing it is faster"):
        Recipe().read(there)
    there.speeds._speeds["near"] = Speed(10.0, now - 3600)
    assert Recipe().read(there) == Recipe().blocks


def test_a_dead_tier_costs_one_call_an_interval() -> None:
    tier, now = MemoryTier(), [0.0]
    guarded = GuardedTier(tier, lambda: now[0])
    tier.down = True
    for _ in range(5):
        with pytest.raises(TierDown, match="memory tier"):
            guarded.manifest(NAME)
    assert tier.n_calls == 1
    now[0] = 5.1
    for _ in range(5):
        with pytest.raises(TierDown, match="memory tier"):
            guarded.manifest(NAME)
    assert tier.n_calls == 2
    tier.down = False
    now[0] = 14.0
    with pytest.raises(TierDown, match="asked again soon"):
        guarded.manifest(NAME)
    now[0] = 15.2
    assert guarded.manifest(NAME) is None
    assert not guarded.breaker.is_open
