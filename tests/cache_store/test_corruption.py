"""Whatever happens to the files of a snapshot: a miss with its reason, a quarantine, never a wrong byte."""

import os
import resource
from dataclasses import fields, replace
from pathlib import Path

import pytest

from cache_store.disk import read_into
from cache_store.errors import MissReason, SnapshotMiss, StorageFailed
from cache_store.fingerprint import Fingerprint
from cache_store.keys import EntryName, SnapshotKey
from cache_store.layout import KVLayout, KVType
from cache_store.shards import plan_shards
from cache_store.store import SnapshotStore
from tests.cache_store.damage import expect_miss, flip, shard_paths
from tests.cache_store.recipes import FINGERPRINT, KEY, LAYOUT, Recipe

BIG_LAYOUT = KVLayout(n_layers=6, n_kv_heads=8, head_dim=256, kv_type=KVType.FP16, block_tokens=2048)
"""A whole block takes two shards of three layers, 50 MB each."""


@pytest.mark.parametrize("part", [0, 1, 7, 8, 100, -1, -2, -300])
def test_a_truncated_shard(store: SnapshotStore, recipe: Recipe, root: Path, part: int) -> None:
    recipe.build(store)
    (shard,) = shard_paths(root, recipe)
    os.truncate(shard, part if part >= 0 else shard.stat().st_size + part)
    expect_miss(store, recipe, MissReason.TRUNCATED, root)


def test_a_shard_that_grew(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    recipe.build(store)
    (shard,) = shard_paths(root, recipe)
    os.truncate(shard, shard.stat().st_size + 1)
    expect_miss(store, recipe, MissReason.TRUNCATED, root)


def test_a_shard_that_shrinks_while_it_is_read(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    recipe.build(store)
    (shard,) = shard_paths(root, recipe)
    with store.open(KEY, FINGERPRINT, LAYOUT) as reader:
        os.truncate(shard, shard.stat().st_size - 1)
        with pytest.raises(SnapshotMiss) as miss:
            reader.verify_all()
    assert miss.value.reason is MissReason.TRUNCATED
    assert [e.state for e in store.entries()] == ["quarantined"]


def test_a_flipped_bit_anywhere_in_a_shard(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    recipe.build(store)
    (shard,) = shard_paths(root, recipe)
    size = shard.stat().st_size
    for offset in [*range(16), *range(16, size, 61), size - 1]:
        flip(shard, offset, offset % 8)
        with pytest.raises(SnapshotMiss) as miss:
            recipe.read(store)
        assert miss.value.reason is MissReason.CHECKSUM, offset
        # Put the very same copy back, whole again.
        (aside,) = [p for p in (root / "quarantine").iterdir() if p.is_dir()]
        aside.rename(recipe.directory(root))
        flip(shard, offset, offset % 8)
        assert recipe.read(store) == recipe.blocks
    flip(shard, size // 2)
    expect_miss(store, recipe, MissReason.CHECKSUM, root)


def test_every_shard_of_several_is_checked(store: SnapshotStore, root: Path) -> None:
    recipe = Recipe(layout=BIG_LAYOUT, n_tokens=2049)
    recipe.build(store)
    shards = shard_paths(root, recipe)
    assert len(shards) == 4
    for shard in shards[1:3]:
        flip(shard, shard.stat().st_size - 5)
        with pytest.raises(SnapshotMiss) as miss:
            recipe.read(store)
        assert miss.value.reason is MissReason.CHECKSUM
        (aside,) = [p for p in (root / "quarantine").iterdir() if p.is_dir()]
        aside.rename(recipe.directory(root))
        flip(shard, shard.stat().st_size - 5)
    # The first two hold the same tokens and have the same length: only their headers tell them apart.
    spare = shards[0].with_name("spare")
    shards[0].rename(spare)
    shards[1].rename(shards[0])
    spare.rename(shards[1])
    expect_miss(store, recipe, MissReason.CHECKSUM, root)


def test_a_missing_shard(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    recipe.build(store)
    shard_paths(root, recipe)[0].unlink()
    assert "missing" in expect_miss(store, recipe, MissReason.TRUNCATED, root)


def test_a_missing_manifest(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    recipe.build(store)
    (recipe.directory(root) / "manifest.json").unlink()
    expect_miss(store, recipe, MissReason.TRUNCATED, root)


@pytest.mark.parametrize("name", ["manifest.json", "shard-0000.safetensors"])
def test_empty_files(store: SnapshotStore, recipe: Recipe, root: Path, name: str) -> None:
    recipe.build(store)
    os.truncate(recipe.directory(root) / name, 0)
    expect_miss(store, recipe, MissReason.TRUNCATED, root)


def test_a_shard_of_another_document(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    """Even of one with the same tokens: its header names its own key."""
    other = replace(recipe, key=SnapshotKey("alice", "document", "doc-2"))
    for one in (recipe, other):
        one.build(store)
    shard_paths(root, recipe)[0].write_bytes(shard_paths(root, other)[0].read_bytes())
    expect_miss(store, recipe, MissReason.CHECKSUM, root)
    assert other.read(store) == other.blocks


def test_records_of_another_place_do_not_pass(recipe: Recipe) -> None:
    """A checksum is bound to key, fingerprint, block and layer, so moved bytes are damage too."""
    record = recipe.blocks[0][0]
    names = [EntryName(KEY, FINGERPRINT.digest), EntryName(KEY, "0" * 16)]
    names.append(EntryName(SnapshotKey("bob", "document", "doc-1"), FINGERPRINT.digest))
    plans = [plan_shards(name, LAYOUT, 43) for name in names]
    sums = {p.checksum(record, block, layer) for p in plans for block in range(6) for layer in range(3)}
    assert len(sums) == 3 * 6 * 3


def test_the_directory_of_another_document(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    other = replace(recipe, key=SnapshotKey("alice", "document", "doc-2"))
    other.build(store)
    recipe.directory(root).parent.mkdir(parents=True)
    other.directory(root).rename(recipe.directory(root))
    store.sweep()
    assert "another snapshot" in expect_miss(store, recipe, MissReason.CHECKSUM, root)


@pytest.mark.parametrize("name", [f.name for f in fields(Fingerprint)])
def test_every_field_of_the_fingerprint_counts(store: SnapshotStore, recipe: Recipe, root: Path, name: str) -> None:
    recipe.build(store)
    changed = replace(recipe, fingerprint=replace(FINGERPRINT, **{name: "other"}))
    with pytest.raises(SnapshotMiss, match=name) as miss:
        changed.read(store)
    assert miss.value.reason is MissReason.FINGERPRINT
    assert recipe.read(store) == recipe.blocks, "a snapshot of another fingerprint is not damaged"
    # The same difference inside the right directory: somebody moved it there.
    recipe.directory(root).rename(changed.directory(root))
    expect_miss(store, changed, MissReason.FINGERPRINT, root)


def test_another_layout(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    recipe.build(store)
    expect_miss(store, replace(recipe, layout=replace(LAYOUT, kv_type=KVType.K8V8)), MissReason.FINGERPRINT, root)


@pytest.mark.parametrize("name", ["manifest.json", "shard-0000.safetensors"])
@pytest.mark.parametrize("kind", ["link", "directory", "pipe", "dangling"])
def test_links_and_special_files_are_refused(
    store: SnapshotStore, recipe: Recipe, root: Path, name: str, kind: str
) -> None:
    recipe.build(store)
    path = recipe.directory(root) / name
    moved = path.rename(root / "elsewhere")
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "dangling":
        path.symlink_to(root / "nowhere")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    expect_miss(store, recipe, MissReason.CHECKSUM, root)


@pytest.mark.parametrize("depth", range(4))
def test_a_linked_directory_is_not_followed(
    store: SnapshotStore, recipe: Recipe, root: Path, tmp_path: Path, depth: int
) -> None:
    recipe.build(store)
    path = [recipe.directory(root), *recipe.directory(root).parents][depth]
    outside = path.rename(tmp_path / "outside")
    path.symlink_to(outside)
    before = sorted(p.name for p in outside.rglob("*"))
    with pytest.raises(SnapshotMiss) as miss:
        recipe.read(store)
    assert miss.value.reason is MissReason.CHECKSUM
    assert not path.is_symlink()
    assert sorted(p.name for p in outside.rglob("*")) == before, "what the link led to is untouched"
    recipe.build(store)
    assert recipe.read(store) == recipe.blocks


def test_deleting_does_not_follow_links(store: SnapshotStore, recipe: Recipe, root: Path, tmp_path: Path) -> None:
    recipe.build(store)
    outside = recipe.directory(root).parent.rename(tmp_path / "outside")
    recipe.directory(root).parent.symlink_to(outside)
    store.delete(KEY)
    assert len(list(outside.rglob("*"))) == 3
    assert store.entries() == []


def test_a_late_reader_does_not_quarantine_the_replacement(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    recipe.build(store)
    with store.open(KEY, FINGERPRINT, LAYOUT) as reader:
        flip(shard_paths(root, recipe)[0], 4000)
        recipe.build(store)
        with pytest.raises(SnapshotMiss):
            reader.verify_all()
    assert recipe.read(store) == recipe.blocks
    assert [e.state for e in store.entries()] == ["published"]


def test_out_of_descriptors_is_not_damage(store: SnapshotStore, recipe: Recipe) -> None:
    recipe.build(store)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
    try:
        with pytest.raises(StorageFailed):
            store.open(KEY, FINGERPRINT, LAYOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert recipe.read(store) == recipe.blocks


def test_an_evicted_snapshot_says_so(store: SnapshotStore, recipe: Recipe) -> None:
    recipe.build(store)
    assert store.evict(KEY).objects == 2
    with pytest.raises(SnapshotMiss) as miss:
        store.open(KEY, FINGERPRINT, LAYOUT)
    assert miss.value.reason is MissReason.EVICTED
    recipe.build(store)
    store.delete(KEY)
    with pytest.raises(SnapshotMiss) as miss:
        store.open(KEY, FINGERPRINT, LAYOUT)
    assert miss.value.reason is MissReason.ABSENT


def test_verify_finds_damage_and_changes_nothing(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    other = replace(recipe, key=SnapshotKey("alice", "turn", "t"))
    for one in (recipe, other):
        one.build(store)
    assert all(verdict.ok for verdict in store.verify())
    flip(shard_paths(root, recipe)[0], 4000)
    verdicts = {v.name.key: v for v in store.verify()}
    assert verdicts[KEY].reason is MissReason.CHECKSUM
    assert verdicts[other.key].ok
    assert {e.state for e in store.entries()} == {"published"}
    assert [v.ok for v in store.verify(other.key)] == [True]


def test_read_into_reports_what_there_was(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    with path.open("rb") as file:
        assert read_into(file.fileno(), memoryview(bytearray(5)), 1) == 2
