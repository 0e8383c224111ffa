"""What holds for every tier: the fake, a real Redis, a path, and a real S3 server."""

import pytest

from cache_store.errors import MissReason, SnapshotMiss
from cache_store.keys import EntryName
from cache_store.tiers.tier import BlobTier, generation_of
from tests.cache_store.recipes import KEY, RESIDENT, SEGMENTED, SLOTS, Recipe
from tests.cache_store.tiers.conftest import MakeStore

KINDS = {
    "document": Recipe(),
    "segmented": SEGMENTED,
    "resident": RESIDENT,
    "slots": SLOTS,
    "turn": Recipe(key=KEY.of_kind("turn"), n_tokens=9, seed=4, context_digest="before"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_back_on_another_host(tier: BlobTier, make_store: MakeStore, kind: str) -> None:
    recipe = KINDS[kind]
    here, there = make_store([tier], "here"), make_store([tier], "there")
    recipe.build(here)
    assert here.places(recipe.key) == {"disk": "ready", tier.name: "pending"}
    assert here.uploader.send_noted() == 0
    assert here.places(recipe.key) == {"disk": "ready", tier.name: "ready"}
    with there.open(recipe.key, recipe.fingerprint, recipe.layout, context_digest=recipe.context_digest) as reader:
        assert reader.source == tier.name
        reader.verify_all()
    assert recipe.read(there) == recipe.blocks
    with there.open(recipe.key, recipe.fingerprint, recipe.layout, context_digest=recipe.context_digest) as reader:
        assert reader.source == "disk"
    assert there.usage() == here.usage()


def test_a_copy_is_listed_and_removed(tier: BlobTier, make_store: MakeStore, recipe: Recipe) -> None:
    store = make_store([tier])
    recipe.build(store)
    store.uploader.send_noted()
    (entry,) = tier.entries()
    name = EntryName(recipe.key, recipe.fingerprint.digest)
    assert (entry.name, entry.complete, entry.nbytes) == (name, True, tier.used())
    assert entry.nbytes == store.usage()
    removed = store.delete_by_tier(recipe.key)
    assert set(removed) == {"disk", tier.name}
    assert removed[tier.name].nbytes == entry.nbytes
    assert removed[tier.name].objects >= 1
    assert list(tier.entries()) == []
    assert store.delete_by_tier(recipe.key)[tier.name].objects == 0
    with pytest.raises(SnapshotMiss) as miss:
        recipe.read(store)
    assert miss.value.reason is MissReason.ABSENT


def test_another_copy_takes_the_place_of_the_first(tier: BlobTier, make_store: MakeStore) -> None:
    first, second = Recipe(n_tokens=43, seed=1), Recipe(n_tokens=30, seed=2)
    here, there = make_store([tier], "here"), make_store([tier], "there")
    for recipe in (first, second):
        recipe.build(here)
        here.uploader.send_noted()
    assert second.read(there) == second.blocks
    assert len(list(tier.entries())) == 1
    assert tier.used() == here.usage()


def test_an_equal_snapshot_is_not_sent_again(tier: BlobTier, make_store: MakeStore, recipe: Recipe) -> None:
    name = EntryName(recipe.key, recipe.fingerprint.digest)
    here, there = make_store([tier], "here"), make_store([tier], "there")
    recipe.build(here)
    here.uploader.send_noted()
    before = tier.manifest(name)
    recipe.build(there)
    assert there.uploader.send_noted() == 0
    assert tier.manifest(name) == before


def test_what_is_not_there_is_nothing(tier: BlobTier) -> None:
    name = EntryName(KEY, "0" * 16)
    assert tier.manifest(name) is None
    assert tier.read(name, "0" * 16, 0, memoryview(bytearray(8))) == 0
    assert (tier.discard(name).objects, tier.remove(KEY).objects) == (0, 0)
    tier.touch(name)


def test_a_shard_of_another_length_is_told(tier: BlobTier) -> None:
    name = EntryName(KEY, "0" * 16)
    tier.write(name, b"manifest", 5, iter([memoryview(b"shard")]))
    generation = generation_of(b"manifest")
    for length in (3, 5, 9):
        memory = memoryview(bytearray(length))
        n = tier.read(name, generation, 0, memory)
        assert n == (5 if length >= 5 else 4)
    assert tier.read(name, generation, 0, memoryview(room := bytearray(5))) == 5
    assert room == b"shard"
    assert tier.read(name, generation_of(b"another"), 0, memoryview(bytearray(5))) == 0
