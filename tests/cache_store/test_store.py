"""Building, opening, resuming, replacing and removing snapshots."""

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from cache_store.errors import BuildLocked, MissReason, SnapshotMiss, StorageFailed
from cache_store.fingerprint import token_digest
from cache_store.keys import EntryName, SnapshotKey
from cache_store.layout import KVLayout, KVType
from cache_store.shards import plan_shards
from cache_store.store import SnapshotStore
from tests.cache_store.recipes import CANARY, FINGERPRINT, KEY, LAYOUT, Recipe


def test_what_was_written_is_read(store: SnapshotStore, recipe: Recipe) -> None:
    manifest = recipe.build(store)
    assert recipe.read(store) == recipe.blocks
    with store.open(KEY, FINGERPRINT, LAYOUT) as reader:
        assert reader.n_tokens == 43
        assert reader.manifest == manifest
        assert reader.canary == CANARY
        assert reader.manifest.next_position == 43
        assert reader.manifest.blocks.n_tokens == [8, 8, 8, 8, 8, 3]
        for layer in range(LAYOUT.n_layers):
            runs = [(n, first, bytes(records), count) for n, first, records, count in reader.read_layer(layer)]
            assert [b[layer] for b in recipe.unpacked(runs)] == [b[layer] for b in recipe.blocks]
        reader.verify_all()


def test_large_snapshots_are_read_ahead_of_the_caller(store: SnapshotStore) -> None:
    layout = KVLayout(n_layers=4, n_kv_heads=2, head_dim=64, kv_type=KVType.K8V8)
    recipe = Recipe(layout=layout, n_tokens=9 * 256 + 100)
    assert recipe.build(store).nbytes > 2 << 20
    assert recipe.read(store) == recipe.blocks
    with store.open(KEY, FINGERPRINT, layout) as reader:
        next(iter(reader.layers()))  # left in the middle: closing the reader must end the thread


def test_a_closed_reader_holds_no_descriptor(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    recipe.build(store)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        recipe.read(store)
        with pytest.raises(SnapshotMiss):
            store.open(KEY, replace(FINGERPRINT, weights="w2"), LAYOUT)
        (recipe.directory(root) / "manifest.json").write_bytes(b"{}")
        with pytest.raises(SnapshotMiss):
            store.open(KEY, FINGERPRINT, LAYOUT)
        recipe.build(store)
        with pytest.raises(BuildLocked), recipe.begin(store):
            recipe.begin(store)
        store.delete(KEY)
        recipe.build(store)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_reader_outlives_deletion(store: SnapshotStore, recipe: Recipe) -> None:
    recipe.build(store)
    with store.open(KEY, FINGERPRINT, LAYOUT) as reader:
        removed = store.delete(KEY)
        assert removed.objects == 2
        assert removed.nbytes > reader.nbytes
        runs = [(layer, first, bytes(records), n) for layer, first, records, n in reader.layers()]
        assert recipe.unpacked(runs) == recipe.blocks
    assert store.usage() == 0
    assert store.delete(KEY).objects == 0
    with pytest.raises(SnapshotMiss) as miss:
        store.open(KEY, FINGERPRINT, LAYOUT)
    assert miss.value.reason is MissReason.ABSENT


def test_deletion_takes_every_copy_of_one_key_and_nothing_of_others(
    store: SnapshotStore, recipe: Recipe, root: Path
) -> None:
    others = [replace(recipe, key=SnapshotKey("alice", "document", name)) for name in ("doc", "doc-1-b")]
    others.append(replace(recipe, key=SnapshotKey("bob", "document", "doc-1")))
    for one in (recipe, replace(recipe, fingerprint=replace(FINGERPRINT, weights="w2")), *others):
        one.build(store)
    store.quarantine(KEY, FINGERPRINT.digest, MissReason.CANARY, "logits differ")
    with recipe.begin(store) as builder:
        builder.append(recipe.blocks[0])
    assert {e.state for e in store.entries() if e.name.key == KEY} == {"published", "building", "quarantined"}
    store.delete(KEY)
    assert sorted(e.name.key for e in store.entries()) == sorted(one.key for one in others)
    assert not [p for p in root.rglob("*doc-1*") if "bob" not in str(p) and "doc-1-b" not in str(p)]
    for one in others:
        assert one.read(store) == one.blocks
    assert store.usage() == store.sweep().used_nbytes


def test_a_build_that_was_deleted_does_not_come_back(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    with recipe.begin(store) as builder:
        for records in recipe.blocks:
            builder.append(records)
        store.delete(KEY)
        with pytest.raises(StorageFailed):
            builder.publish()
    assert store.entries() == []
    assert store.usage() == 0


def test_a_build_goes_on_from_its_journal(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    with recipe.begin(store) as builder:
        for records in recipe.blocks[:4]:
            builder.append(records)
    with recipe.begin(SnapshotStore(root)) as builder:
        assert builder.n_blocks_done == 4
        assert [builder.block_records(i) for i in range(4)] == recipe.blocks[:4]
        for records in recipe.blocks[4:]:
            builder.append(records)
        builder.publish(canary=CANARY)
    resumed = (recipe.directory(root) / "shard-0000.safetensors").read_bytes()
    store.delete(KEY)
    recipe.build(store)
    assert (recipe.directory(root) / "shard-0000.safetensors").read_bytes() == resumed


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 5},
        {"n_tokens": 42},
        {"layout": replace(LAYOUT, n_layers=4)},
    ],
    ids=["tokens", "length", "layout"],
)
def test_a_journal_of_something_else_is_dropped(store: SnapshotStore, recipe: Recipe, other: dict[str, object]) -> None:
    with recipe.begin(store) as builder:
        builder.append(recipe.blocks[0])
    changed = replace(recipe, **other)
    with changed.begin(store) as builder:
        assert builder.n_blocks_done == 0
    changed.build(store)
    assert changed.read(store) == changed.blocks


def test_a_journal_of_another_context_is_dropped(store: SnapshotStore, recipe: Recipe) -> None:
    with recipe.begin(store) as builder:
        builder.append(recipe.blocks[0])
    for extra in ({"context_digest": "x"}, {"first_position": 9}):
        with store.begin(KEY, FINGERPRINT, LAYOUT, recipe.tokens, **extra) as builder:
            assert builder.n_blocks_done == 0
            builder.append(recipe.blocks[0])


@pytest.mark.parametrize("damage", ["torn", "flipped", "block", "doubled", "garbage"])
def test_a_damaged_journal_keeps_its_valid_prefix(
    store: SnapshotStore, recipe: Recipe, root: Path, damage: str
) -> None:
    with recipe.begin(store) as builder:
        for records in recipe.blocks[:3]:
            builder.append(records)
    (journal,) = (root / "building").glob("*.journal")
    (shard,) = (root / "building").glob("*/shard-*")
    data = journal.read_bytes()
    if damage == "torn":
        journal.write_bytes(data[:-9])
    elif damage == "flipped":
        journal.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif damage == "doubled":
        journal.write_bytes(data + data.splitlines(keepends=True)[-1])
    elif damage == "garbage":
        journal.write_bytes(data + b"\0" * 100)
    else:
        plan = plan_shards(store.entries()[0].name, LAYOUT, recipe.n_tokens)
        with shard.open("r+b") as file:
            file.seek(plan.record_offset(plan.shards[0], 2, 1))
            file.write(b"damage")
    with recipe.begin(store) as builder:
        assert builder.n_blocks_done == (3 if damage in ("doubled", "garbage") else 2)
        for records in recipe.blocks[builder.n_blocks_done :]:
            builder.append(records)
        builder.publish()
    assert recipe.read(store) == recipe.blocks


def test_one_writer_at_a_time(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    with recipe.begin(store), pytest.raises(BuildLocked):
        recipe.begin(SnapshotStore(root))
    with recipe.begin(store) as builder:
        replace(recipe, fingerprint=replace(FINGERPRINT, weights="w2")).build(store)
        builder.abort()
    assert list((root / "locks").iterdir()) == []


def test_publishing_again_replaces_in_one_step(store: SnapshotStore, recipe: Recipe) -> None:
    recipe.build(store)
    with store.open(KEY, FINGERPRINT, LAYOUT) as old:
        changed = replace(recipe, seed=9, n_tokens=20)
        changed.build(store)
        assert changed.read(store) == changed.blocks
        runs = [(layer, first, bytes(records), n) for layer, first, records, n in old.layers()]
        assert recipe.unpacked(runs) == recipe.blocks
    assert store.usage() == store.sweep().used_nbytes
    assert len(store.entries()) == 1


def test_shards_are_safetensors_files(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    recipe.build(store)
    with safe_open(recipe.directory(root) / "shard-0000.safetensors", "numpy") as file:
        assert sorted(file.keys()) == ["layer.000", "layer.001", "layer.002", "tokens"]
        assert file.get_tensor("tokens").tolist() == recipe.tokens
        assert file.get_tensor("layer.001").tobytes() == b"".join(b[1] for b in recipe.blocks)
        assert file.metadata()["key"] == "alice/document/doc-1"


def test_files_and_directories_are_private(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    old = os.umask(0)
    try:
        store = SnapshotStore(root / "inner")
        recipe.build(store)
        store.quarantine(KEY, FINGERPRINT.digest, MissReason.CANARY, "x")
        recipe.build(store)
        with replace(recipe, key=SnapshotKey("bob", "document", "b")).begin(store) as builder:
            builder.append(recipe.blocks[0])
    finally:
        os.umask(old)
    for path in (root / "inner").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("bad", ["", "..", ".", "a/b", "a\0b", "ä", "x" * 65, "a.b", "a b", "a\n"])
def test_ids_cannot_lead_out_of_the_store(bad: str) -> None:
    for arguments in ((bad, "document", "a"), ("a", "document", bad), ("a", bad, "a")):
        with pytest.raises(ValueError, match=r"an id is|a snapshot is of"):
            SnapshotKey(*arguments)


def test_tokens_asked_for_must_be_those_stored(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    recipe.build(store)
    digest = token_digest(np.array(recipe.tokens, "<i4").tobytes())
    store.open(KEY, FINGERPRINT, LAYOUT, token_digest=digest).close()
    with pytest.raises(SnapshotMiss, match="other tokens") as miss:
        store.open(KEY, FINGERPRINT, LAYOUT, token_digest="0" * 32)
    assert miss.value.reason is MissReason.CHECKSUM
    assert [e.state for e in store.entries()] == ["quarantined"]


def test_a_turn_belongs_to_its_context(store: SnapshotStore, recipe: Recipe) -> None:
    turn = SnapshotKey("alice", "turn", "turn-1")
    with store.begin(turn, FINGERPRINT, LAYOUT, recipe.tokens, context_digest="c", first_position=100) as builder:
        for records in recipe.blocks:
            builder.append(records)
        builder.publish()
    with store.open(turn, FINGERPRINT, LAYOUT, context_digest="c") as reader:
        assert reader.manifest.first_position == 100
        assert reader.manifest.next_position == 143
    with pytest.raises(SnapshotMiss, match="follows other tokens"):
        store.open(turn, FINGERPRINT, LAYOUT, context_digest="d")


def test_a_turn_left_unfinished_leaves_nothing(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    turn = replace(recipe, key=SnapshotKey("alice", "turn", "turn-1"))
    with turn.begin(store) as builder:
        builder.append(recipe.blocks[0])
    assert list((root / "building").iterdir()) == []
    assert store.usage() == 0


def test_records_that_do_not_fit_are_refused(store: SnapshotStore, recipe: Recipe) -> None:
    blocks = recipe.blocks
    with recipe.begin(store) as builder:
        for wrong in (blocks[0][:2], [*blocks[0], b""], [blocks[0][0][:-1], *blocks[0][1:]], blocks[-1]):
            with pytest.raises(ValueError, match="takes 3 records"):
                builder.append(wrong)
        with pytest.raises(ValueError, match="0 of 6 blocks"):
            builder.publish()
        for records in blocks:
            builder.append(records)
        with pytest.raises(ValueError, match="all 6 blocks"):
            builder.append(blocks[-1])
    for tokens in ([], [-1], [1 << 31]):
        with pytest.raises(ValueError, match="at least one"):
            store.begin(KEY, FINGERPRINT, LAYOUT, tokens)


@pytest.mark.parametrize("shard_nbytes", [1, 1500, 3000, 5000, 64 << 20])
@pytest.mark.parametrize("n_tokens", [1, 8, 43])
def test_shards_cover_every_record_once(shard_nbytes: int, n_tokens: int) -> None:
    plan = plan_shards(EntryName(KEY, FINGERPRINT.digest), LAYOUT, n_tokens, shard_nbytes=shard_nbytes)
    seen: dict[tuple[int, int], int] = {}
    for shard in plan.shards:
        spans = []
        for block in range(shard.first_block, shard.first_block + shard.n_blocks):
            for layer in range(shard.first_layer, shard.first_layer + shard.n_layers):
                assert shard in plan.shards_of(block)
                seen[block, layer] = seen.get((block, layer), 0) + 1
                at = plan.record_offset(shard, block, layer)
                spans.append((at, at + LAYOUT.record_nbytes(plan.block_length(block))))
        spans.sort()
        assert spans[0][0] == shard.tokens_offset + 4 * shard.n_tokens
        assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]
        assert spans[-1][1] == shard.nbytes
    assert seen == {(b, n): 1 for b in range(plan.n_blocks) for n in range(LAYOUT.n_layers)}


def test_runs_that_are_kept_keep_their_bytes(store: SnapshotStore) -> None:
    layout = KVLayout(n_layers=12, n_kv_heads=2, head_dim=64, kv_type=KVType.K8V8)
    recipe = Recipe(layout=layout, n_tokens=900)
    assert recipe.build(store).nbytes > 2 << 20
    with store.open(KEY, FINGERPRINT, layout) as reader:
        kept = [(layer, first, np.frombuffer(records, np.uint8), n) for layer, first, records, n in reader.layers()]
        for records in (r for layer in range(12) for r in reader.read_layer(layer)):
            assert records[2].nbytes
        assert recipe.unpacked([(a, b, c.tobytes(), d) for a, b, c, d in kept]) == recipe.blocks


def test_the_store_needs_no_torch() -> None:
    """The process that serves HTTP deletes and lists snapshots; torch costs it seconds and hundreds of MB."""
    code = "import sys, cache_store.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
