"""The start-up sweep: what it takes, what it leaves, and what it says about it."""

from dataclasses import replace
from pathlib import Path

from cache_store.errors import MissReason
from cache_store.keys import EntryName, SnapshotKey, parse_flat
from cache_store.store import SnapshotStore
from tests.cache_store.recipes import FINGERPRINT, KEY, Recipe


def test_leftovers_of_any_name_go(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    recipe.build(store)
    used = store.usage()
    flat = EntryName(SnapshotKey("bob", "document", "b"), FINGERPRINT.digest).flat
    (root / "building" / "what-is-this").mkdir()
    (root / "building" / "what-is-this" / "file").write_text("x" * 1000)
    (root / "building" / flat).mkdir()
    (root / "building" / f"{flat}~x.journal").write_text("")
    (root / "trash" / "old").mkdir()
    (root / "locks" / f"{flat}.lock").write_text("")
    (root / "locks" / "unknown").write_text("")
    (root / "snapshots" / "bob" / "documents" / "b").mkdir(parents=True)
    report = store.sweep()
    assert report.removed.nbytes == 1000
    assert "what-is-this" in report.removed_names
    assert report.used_nbytes == used
    for name in ("building", "trash", "locks"):
        assert list((root / name).iterdir()) == []
    assert [p.name for p in (root / "snapshots").iterdir()] == ["alice"]
    assert recipe.read(store) == recipe.blocks


def test_unfinished_builds_of_documents_stay(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    with recipe.begin(store) as builder:
        builder.append(recipe.blocks[0])
    report = SnapshotStore(root).sweep()
    assert [name.key for name in report.kept_builds] == [KEY]
    assert report.removed.objects == 0
    with recipe.begin(store) as builder:
        assert builder.n_blocks_done == 1


def test_a_build_that_runs_is_left_alone(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    turn = replace(recipe, key=SnapshotKey("alice", "turn", "t"))
    with turn.begin(store) as builder:
        SnapshotStore(root).sweep()
        for records in turn.blocks:
            builder.append(records)
        builder.publish()
    assert turn.read(store) == turn.blocks


def test_old_quarantined_copies_go(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    recipe.build(store)
    store.quarantine(KEY, FINGERPRINT.digest, MissReason.CANARY, "logits differ")
    assert store.sweep().removed_names == []
    assert len(store.entries()) == 1
    report = store.sweep(quarantine_s=-1.0)
    assert report.removed.objects == 2
    assert report.used_nbytes == 0
    assert list((root / "quarantine").iterdir()) == []


def test_flat_names_are_read_back() -> None:
    name = EntryName(SnapshotKey("a-b_c", "turn", "D-9"), FINGERPRINT.digest)
    for suffix in ("", ".lock", ".json", "~1a", "~1a.json"):
        assert parse_flat(name.flat + suffix) == name
    for wrong in ("", "a~b", "a~document~c", "a~document~c~xyz", f"../a~document~c~{FINGERPRINT.digest}"):
        assert parse_flat(wrong) is None
