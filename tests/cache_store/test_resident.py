"""Resident rows: a snapshot of their own beside the document's, which goes with it and says where it stands."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_store.errors import MissReason, SnapshotMiss
from cache_store.keys import EntryName, SnapshotKey
from cache_store.rows import take_rows
from cache_store.segments import WHOLE, Segments
from cache_store.store import SnapshotStore
from tests.cache_store.damage import expect_miss, flip, shard_paths
from tests.cache_store.recipes import CANARY, FINGERPRINT, KEY, LAYOUT, RESIDENT, RESIDENT_KEY, SEGMENTED, Recipe
from tests.cache_store.rewrite import rewrite

TURN_KEY = KEY.of_kind("turn")


@pytest.fixture
def both(store: SnapshotStore) -> SnapshotStore:
    """A store with a document in segments and the rows picked from it."""
    for recipe in (SEGMENTED, RESIDENT):
        recipe.build(store)
    return store


def states(store: SnapshotStore) -> set[tuple[str, str]]:
    return {(entry.name.key.kind, entry.state) for entry in store.entries()}


def test_rows_stand_where_they_are_said_to(both: SnapshotStore, root: Path) -> None:
    assert RESIDENT.read(both) == RESIDENT.blocks
    with both.open(RESIDENT_KEY, FINGERPRINT, LAYOUT, context_digest="c", segments=WHOLE) as reader:
        assert (reader.n_tokens, reader.next_position, reader.last_position) == (19, 19, 13)
        assert (reader.segments, reader.canary) == (WHOLE, CANARY)
        assert reader.manifest.blocks.first_position == [0, 8, 16], "the table counts rows"
    assert RESIDENT.directory(root).parts[-4:-1] == ("alice", "residents", "doc-1")
    assert list((root / "building").iterdir()) == []


def test_rows_are_picked_from_the_document(both: SnapshotStore) -> None:
    """What a build does after the prefill: sinks, a token of each head's own choice, the window."""
    rows = np.array([0, 1, 2, 17, 25, *range(35, 43)])
    with both.open(KEY, FINGERPRINT, LAYOUT, segments=Segments(16, 3)) as cold:
        layers = [take_rows([run[2] for run in cold.read_layer(n)], 43, LAYOUT, rows) for n in range(3)]
        ids = np.where((rows < 3) | (rows >= 35), cold.token_ids[rows], 0)
        positions = {"next_position": cold.next_position, "last_position": cold.last_position}
        with both.begin(RESIDENT_KEY, FINGERPRINT, LAYOUT, ids, context_digest="c", **positions) as builder:
            for block in zip(*layers, strict=True):
                builder.append(block)
            builder.publish(canary=CANARY)
    with both.open(RESIDENT_KEY, FINGERPRINT, LAYOUT, context_digest="c") as reader:
        assert reader.token_ids[-1] == SEGMENTED.tokens[-1], "the last row is the document's last token"
        assert (reader.next_position, reader.last_position) == (19, 13)


def test_rows_of_something_else_are_a_miss(both: SnapshotStore) -> None:
    with pytest.raises(SnapshotMiss, match="follows other tokens") as miss:
        both.open(RESIDENT_KEY, FINGERPRINT, LAYOUT, context_digest="d")
    assert miss.value.reason is MissReason.CHECKSUM
    assert states(both) == {("document", "published"), ("resident", "quarantined")}


@pytest.mark.parametrize(
    ("key", "positions"),
    [
        (RESIDENT_KEY, {}),
        (RESIDENT_KEY, {"next_position": 19}),
        (RESIDENT_KEY, {"last_position": 13}),
        (RESIDENT_KEY, {"next_position": 13, "last_position": 13}),
        (RESIDENT_KEY, {"next_position": 13, "last_position": -1}),
        (RESIDENT_KEY, {"next_position": (1 << 40) + 1, "last_position": 1}),
        (RESIDENT_KEY, {"next_position": 19, "last_position": 13, "first_position": 1}),
        (KEY, {"next_position": 19, "last_position": 13}),
        (KEY, {"last_position": 13}),
        (TURN_KEY, {"next_position": 19}),
        (TURN_KEY, {"first_position": -1}),
    ],
    ids=str,
)
def test_positions_that_cannot_be(store: SnapshotStore, key: SnapshotKey, positions: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="position"):
        store.begin(key, FINGERPRINT, LAYOUT, [1] * 19, **positions)
    assert store.entries() == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"next_position": 13}, MissReason.CHECKSUM),
        ({"next_position": -1}, MissReason.CHECKSUM),
        ({"kind": "document"}, MissReason.CHECKSUM),
        ({"kind": "turn"}, MissReason.CHECKSUM),
        ({"sections": {}}, MissReason.CHECKSUM),
        ({"sections": {"resident": {"last_position": 19}}}, MissReason.CHECKSUM),
        ({"sections": {"resident": {"last_position": -1}}}, MissReason.CHECKSUM),
        ({"sections": {"resident": {}}}, MissReason.CHECKSUM),
        ({"sections": {"resident": {"last_position": 13, "bias": 1}}}, MissReason.CHECKSUM),
        ({"sections": {"resident": {"last_position": 13}, "biases": {}}}, MissReason.VERSION),
        ({"retention": {"segment_tokens": 8, "sink_tokens": 3}}, MissReason.VERSION),
        ({"context_digest": "d"}, MissReason.CHECKSUM),
    ],
    ids=str,
)
def test_positions_that_do_not_agree(
    both: SnapshotStore, root: Path, change: dict[str, object], reason: MissReason
) -> None:
    rewrite(root, RESIDENT, lambda body: body.update(change))
    expect_miss(both, RESIDENT, reason, root)
    assert SEGMENTED.read(both) == SEGMENTED.blocks


def test_an_older_reader_would_refuse_what_is_new(both: SnapshotStore) -> None:
    """The first readers of format version 1 know documents and turns at consecutive positions, and one section."""
    for recipe in (SEGMENTED, RESIDENT):
        with both.open(recipe.key, FINGERPRINT, LAYOUT, context_digest=recipe.context_digest) as reader:
            manifest = reader.manifest
        known_table = manifest.blocks == WHOLE.table(LAYOUT, manifest.n_tokens)
        known_sections = set(manifest.sections) <= {"canary"}
        assert not (known_table and known_sections), manifest.kind


@pytest.mark.parametrize("offset", [*range(0, 16, 5), 1000, 2000, -1])
def test_damage_of_the_rows_leaves_the_document(both: SnapshotStore, root: Path, offset: int) -> None:
    (shard,) = shard_paths(root, RESIDENT)
    flip(shard, offset % shard.stat().st_size)
    expect_miss(both, RESIDENT, MissReason.CHECKSUM, root)
    assert SEGMENTED.read(both) == SEGMENTED.blocks


def test_rows_of_a_document_are_not_its_snapshot(both: SnapshotStore, root: Path) -> None:
    """One directory in the place of the other, both ways: each is bound to its own kind."""
    aside = RESIDENT.directory(root).rename(root / "aside")
    SEGMENTED.directory(root).rename(RESIDENT.directory(root))
    aside.rename(SEGMENTED.directory(root))
    both.sweep()
    for recipe in (SEGMENTED, RESIDENT):
        with pytest.raises(SnapshotMiss, match="another snapshot") as miss:
            recipe.read(both)
        assert miss.value.reason is MissReason.CHECKSUM
    assert states(both) == {("document", "quarantined"), ("resident", "quarantined")}


@pytest.mark.parametrize("remove", [SnapshotStore.delete, SnapshotStore.evict], ids=["delete", "evict"])
def test_the_rows_go_with_their_document(
    both: SnapshotStore, root: Path, remove: Callable[[SnapshotStore, SnapshotKey], object]
) -> None:
    both.quarantine(RESIDENT_KEY, FINGERPRINT.digest, MissReason.CANARY, "x")
    RESIDENT.build(both)
    turn, other = replace(SEGMENTED, key=TURN_KEY, segments=WHOLE), replace(RESIDENT, key=other_key("resident"))
    for recipe in (turn, replace(SEGMENTED, key=other_key("document")), other):
        recipe.build(both)
    remove(both, KEY)
    assert sorted(entry.name.key for entry in both.entries()) == sorted(
        [TURN_KEY, *map(other_key, ("document", "resident"))]
    )
    assert both.usage() == both.sweep().used_nbytes
    with pytest.raises(SnapshotMiss) as miss:
        SEGMENTED.read(both)
    assert miss.value.reason is (MissReason.ABSENT if remove is SnapshotStore.delete else MissReason.EVICTED)
    assert other.read(both) == other.blocks
    remove(both, KEY)


def other_key(kind: str) -> SnapshotKey:
    return SnapshotKey("alice", kind, "doc-2")


def test_the_rows_go_alone(both: SnapshotStore) -> None:
    assert both.delete(RESIDENT_KEY).objects == 2
    assert states(both) == {("document", "published")}
    assert SEGMENTED.read(both) == SEGMENTED.blocks


def test_rows_left_unfinished_leave_nothing(both: SnapshotStore, root: Path) -> None:
    both.delete(RESIDENT_KEY)
    used = both.usage()
    with RESIDENT.begin(both) as builder:
        builder.append(RESIDENT.blocks[0])
    assert list((root / "building").iterdir()) == []
    assert both.usage() == used


def test_a_sweep_takes_rows_without_a_document(both: SnapshotStore, recipe: Recipe) -> None:
    for keep in ("published", "quarantined", "building"):
        if keep == "quarantined":
            both.quarantine(KEY, FINGERPRINT.digest, MissReason.CANARY, "x")
        elif keep == "building":
            both.delete(KEY)
            RESIDENT.build(both)
            with recipe.begin(both) as builder:
                builder.append(recipe.blocks[0])
        assert both.sweep().removed.objects == 0
        assert states(both) == {("document", keep), ("resident", "published")}
    with recipe.begin(both) as builder:
        builder.abort()
    report = both.sweep()
    assert report.removed_names == [RESIDENT_KEY.text]
    assert report.removed.objects == 2
    assert (both.entries(), report.used_nbytes) == ([], 0)


def test_what_is_listed_and_verified(both: SnapshotStore, root: Path) -> None:
    found = {entry.name.key.kind: (entry.n_tokens, entry.n_segments) for entry in both.entries()}
    assert found == {"document": (43, 3), "resident": (19, 1)}
    assert {verdict.name.key.kind: verdict.ok for verdict in both.verify()} == {"document": True, "resident": True}
    flip(shard_paths(root, RESIDENT)[0], 1500)
    verdicts = {verdict.name.key.kind: verdict for verdict in both.verify()}
    assert verdicts["resident"].reason is MissReason.CHECKSUM
    assert verdicts["document"].ok


def test_names_of_what_is_made_from_a_document() -> None:
    draft_key = KEY.of_kind("draft")
    assert KEY.made == (RESIDENT_KEY, KEY.of_kind("slots"), draft_key)
    assert RESIDENT_KEY.source == KEY.of_kind("slots").source == draft_key.source == KEY
    assert (RESIDENT_KEY.leaves_with, KEY.leaves_with, draft_key.leaves_with) == (KEY, KEY, draft_key)
    assert (RESIDENT_KEY.made, KEY.source, TURN_KEY.made, TURN_KEY.source) == ((), None, (), None)
    assert EntryName(RESIDENT_KEY, FINGERPRINT.digest).flat.startswith("alice~resident~doc-1~")
