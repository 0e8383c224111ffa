"""Summary slots: rows of each head's own, in a snapshot beside the document's that says how many each head has."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cache_store.errors import MissReason, SnapshotMiss
from cache_store.layout import KVLayout, KVType
from cache_store.rows import take_head_rows
from cache_store.slots import SLOT_BLOCK_TOKENS, check_slots, layer_rows, slot_layout, stored_rows
from cache_store.store import SnapshotStore
from tests.cache_store.damage import expect_miss, flip, shard_paths
from tests.cache_store.recipes import CANARY, FINGERPRINT, KEY, LAYOUT, RESIDENT, SEGMENTED, SLOTS
from tests.cache_store.rewrite import rewrite


@pytest.fixture
def all_three(store: SnapshotStore) -> SnapshotStore:
    """A store with a document in segments, the rows picked from it, and its slots."""
    for recipe in (SEGMENTED, RESIDENT, SLOTS):
        recipe.build(store)
    return store


def states(store: SnapshotStore) -> set[tuple[str, str]]:
    return {(entry.name.key.kind, entry.state) for entry in store.entries()}


def test_slots_come_back_with_their_counts(all_three: SnapshotStore, root: Path) -> None:
    assert SLOTS.read(all_three) == SLOTS.blocks
    with all_three.open(SLOTS.key, FINGERPRINT, SLOTS.layout, context_digest="c") as reader:
        assert reader.manifest.slots is not None
        assert reader.manifest.slots.counts == [[3], [0], [65]]
        assert (reader.n_tokens, reader.next_position, reader.canary) == (128, 128, CANARY)
    assert SLOTS.directory(root).parts[-4:-1] == ("alice", "slots", "doc-1")
    assert list((root / "building").iterdir()) == []


def test_slots_are_picked_from_the_document(all_three: SnapshotStore) -> None:
    """What a build does: the rows of each head from the beginning of a block on."""
    rows = [np.array([0, 4, 9]), np.array([], np.int64), np.arange(40)]
    with all_three.open(KEY, FINGERPRINT, LAYOUT) as cold:
        records = [
            record
            for layer, own in enumerate(rows)
            for record in take_head_rows([run[2] for run in cold.read_layer(layer)], 43, LAYOUT, 0, own)
        ]
    counts = [[len(own)] for own in rows]
    assert layer_rows(counts) == [32, 0, 64]
    with all_three.begin(SLOTS.key, FINGERPRINT, slot_layout(LAYOUT), [0] * 96, slot_counts=counts) as builder:
        for record in records:
            builder.append([record])
        builder.publish()
    with all_three.open(SLOTS.key, FINGERPRINT, slot_layout(LAYOUT)) as reader:
        assert b"".join(run[2] for run in reader.layers()) == b"".join(records)


@pytest.mark.parametrize(
    "change",
    [
        {"slot_counts": None},
        {"slot_counts": ((3,), (33,), (65,))},
        {"slot_counts": ((3,), (0, 65))},
        {"slot_counts": ((3,), (-1,), (65,))},
        {"key": KEY},
        {"key": KEY.of_kind("turn")},
        {"layout": LAYOUT},
        {"layout": KVLayout(1, 1, 32, KVType.K8V4, 16)},
    ],
    ids=str,
)
def test_what_cannot_be_slots_is_refused(store: SnapshotStore, change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="slots"):
        replace(SLOTS, **change).begin(store)  # pyright: ignore[reportArgumentType]
    assert store.entries() == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sections": {}}, MissReason.CHECKSUM),
        ({"kind": "document"}, MissReason.CHECKSUM),
        ({"sections": {"slots": {"counts": []}}}, MissReason.CHECKSUM),
        ({"sections": {"slots": {"counts": [[]]}}}, MissReason.CHECKSUM),
        ({"sections": {"slots": {"counts": [[3], [0], [66, -1]]}}}, MissReason.CHECKSUM),
        ({"sections": {"slots": {"counts": [[3], [0], [97]]}}}, MissReason.CHECKSUM),
        ({"sections": {"slots": {"counts": [[3], [1 << 40], [65]]}}}, MissReason.CHECKSUM),
        ({"sections": {"slots": {"counts": [[3], [0, 65]]}}}, MissReason.CHECKSUM),
        ({"sections": {"slots": {"counts": [[3.5], [0], [65]]}}}, MissReason.CHECKSUM),
        ({"sections": {"slots": {"counts": [[3], [0], [65]], "bias": 1}}}, MissReason.CHECKSUM),
        ({"sections": {"slots": {"counts": [[3], [0], [65]]}, "resident": {"last_position": 1}}}, MissReason.CHECKSUM),
        ({"sections": {"slots": {"counts": [[3], [0], [65]]}, "biases": {}}}, MissReason.VERSION),
    ],
    ids=str,
)
def test_counts_that_do_not_agree(
    all_three: SnapshotStore, root: Path, change: dict[str, object], reason: MissReason
) -> None:
    rewrite(root, SLOTS, lambda body: body.update(change))
    expect_miss(all_three, SLOTS, reason, root)
    for recipe in (SEGMENTED, RESIDENT):
        assert recipe.read(all_three) == recipe.blocks


def test_no_other_snapshot_has_counts(all_three: SnapshotStore, root: Path) -> None:
    sections = {"resident": {"last_position": 13}, "slots": {"counts": [[19]]}}
    rewrite(root, RESIDENT, lambda body: body.update({"sections": sections}))
    expect_miss(all_three, RESIDENT, MissReason.CHECKSUM, root)


@pytest.mark.parametrize("offset", [*range(0, 16, 5), 1000, 2000, -1])
def test_damage_of_the_slots_leaves_the_others(all_three: SnapshotStore, root: Path, offset: int) -> None:
    (shard,) = shard_paths(root, SLOTS)
    flip(shard, offset % shard.stat().st_size)
    expect_miss(all_three, SLOTS, MissReason.CHECKSUM, root)
    for recipe in (SEGMENTED, RESIDENT):
        assert recipe.read(all_three) == recipe.blocks


@pytest.mark.parametrize("remove", [SnapshotStore.delete, SnapshotStore.evict], ids=["delete", "evict"])
def test_slots_go_with_their_document(all_three: SnapshotStore, remove) -> None:
    remove(all_three, KEY)
    assert all_three.entries() == []
    with pytest.raises(SnapshotMiss) as miss:
        SLOTS.read(all_three)
    assert miss.value.reason is MissReason.ABSENT


def test_slots_go_alone(all_three: SnapshotStore) -> None:
    assert all_three.delete(SLOTS.key).objects == 2
    assert states(all_three) == {("document", "published"), ("resident", "published")}


def test_a_sweep_takes_slots_without_a_document(store: SnapshotStore) -> None:
    SLOTS.build(store)
    report = store.sweep()
    assert report.removed_names == [SLOTS.key.text]
    assert (store.entries(), report.used_nbytes) == ([], 0)


def test_slots_are_listed_and_verified(all_three: SnapshotStore, root: Path) -> None:
    found = {entry.name.key.kind: entry.n_tokens for entry in all_three.entries()}
    assert found == {"document": 43, "resident": 19, "slots": 128}
    flip(shard_paths(root, SLOTS)[0], 1500)
    bad = [(v.name.key.kind, v.reason) for v in all_three.verify() if not v.ok]
    assert bad == [("slots", MissReason.CHECKSUM)]


def test_counts_are_checked_by_arithmetic() -> None:
    assert [stored_rows(n) for n in (0, 1, 32, 33)] == [0, 32, 32, 64]
    check_slots([[1, 33], [0, 32]], slot_layout(LAYOUT), 32 + 64 + 32)
    assert slot_layout(LAYOUT).block_tokens == SLOT_BLOCK_TOKENS
