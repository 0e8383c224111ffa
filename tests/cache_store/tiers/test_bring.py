"""A copy on its way to the disk: checked and written while it arrives."""

import errno
from pathlib import Path

import pytest

from cache_store.disk import Disk
from cache_store.errors import SnapshotMiss
from cache_store.keys import EntryName
from cache_store.tiers.breaker import GuardedTier
from cache_store.tiers.copy import CopyPlan, ShardCheck
from cache_store.tiers.tier import BlobTier
from tests.cache_store.recipes import SEGMENTED, SLOTS, Recipe
from tests.cache_store.tiers.conftest import MakeStore


@pytest.fixture(params=[Recipe(), SEGMENTED, SLOTS], ids=["whole", "segmented", "slots"])
def arriving(request: pytest.FixtureRequest, make_store: MakeStore) -> tuple[CopyPlan, bytearray]:
    """A snapshot's plan and the bytes of its only shard."""
    recipe: Recipe = request.param
    store = make_store([])
    recipe.build(store)
    directory: Path = recipe.directory(store.root)
    name = EntryName(recipe.key, recipe.fingerprint.digest)
    plan = CopyPlan(name, (directory / "manifest.json").read_bytes())
    (shard,) = plan.shards
    return plan, bytearray((directory / shard.file_name).read_bytes())


def test_what_has_arrived_is_checked_record_by_record(arriving: tuple[CopyPlan, bytearray]) -> None:
    plan, data = arriving
    shard, memory = plan.shards[0], bytearray(len(data))
    check = ShardCheck(plan, shard, memoryview(memory))
    known, right = {0}, 0
    for at in range(0, len(data), 7):
        end = min(at + 7, len(data))
        memory[at:end] = data[at:end]
        right = check.up_to(end)
        assert max(known) <= right <= end
        known.add(right)
    assert right == len(data)
    assert len(known) == 2 + shard.n_layers * shard.n_blocks
    plan.check_tokens()


def test_damage_shows_with_the_record_it_is_in(arriving: tuple[CopyPlan, bytearray]) -> None:
    plan, data = arriving
    shard = plan.shards[0]
    places = [plan.record(shard, block, layer) for layer in range(shard.n_layers) for block in range(shard.n_blocks)]
    assert [place.start for place in places[1:]] == [place.stop for place in places[:-1]]
    for place in places:
        damaged = bytearray(data)
        damaged[place.stop - 1] ^= 1
        check = ShardCheck(plan, shard, memoryview(damaged))
        assert check.up_to(place.stop - 1) == place.start
        with pytest.raises(SnapshotMiss, match="is damaged"):
            check.up_to(place.stop)


def test_a_disk_that_fails_meanwhile_is_not_the_tiers_fault(
    tier: BlobTier, make_store: MakeStore, recipe: Recipe
) -> None:
    class Failing(Disk):
        fails = False

        def write_at(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
            if self.fails:
                raise OSError(errno.EIO, "input/output error")
            super().write_at(fd, data, offset)

    here, disk, guarded = make_store([tier], "here"), Failing(), GuardedTier(tier)
    recipe.build(here)
    here.uploader.send_noted()
    there = make_store([guarded], "there", disk=disk)
    disk.fails = True
    with pytest.raises(SnapshotMiss, match="bringing a snapshot: input/output error"):
        recipe.read(there)
    assert not guarded.breaker.is_open
    disk.fails = False
    assert recipe.read(there) == recipe.blocks
