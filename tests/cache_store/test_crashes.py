"""Killed between any two steps, run twice at once: what is seen is whole, a sweep leaves nothing behind."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_store.errors import MissReason, SnapshotMiss
from cache_store.keyring import KeyRing
from cache_store.store import SnapshotStore
from tests.cache_store.processes import CHANGED, DOCUMENT, KEYS, ROWS, TURN
from tests.cache_store.recipes import FINGERPRINT, KEY, SLOTS, Recipe

REPOSITORY = Path(__file__).parents[2]


def run(what: str, root: Path, *rest: str) -> None:
    start(what, root, *rest).communicate()


def start(what: str, root: Path, *rest: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.cache_store.processes", what, str(root), *rest]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def each_crash(what: str, tmp_path: Path) -> Iterator[Path]:
    process = start(what, tmp_path)
    process.communicate()
    assert process.returncode == 0
    roots = sorted(tmp_path.iterdir())
    assert len(roots) > 5
    yield from roots


def found(store: SnapshotStore, recipe: Recipe) -> bool:
    """Whether the snapshot is there; when it is, it is right."""
    try:
        read = recipe.read(store)
    except SnapshotMiss as miss:
        if miss.reason is not MissReason.ABSENT:
            raise
        return False
    assert read == recipe.blocks
    return True


def published_rows(store: SnapshotStore) -> bool:
    return any(e.name.key == ROWS.key and e.state == "published" for e in store.entries())


def expect_tidy(store: SnapshotStore, root: Path) -> None:
    report = store.sweep()
    for name in ("building", "locks", "trash"):
        assert list((root / name).iterdir()) == [], name
    assert report.kept_builds == []
    assert report.used_nbytes == sum(entry.nbytes for entry in store.entries())


@pytest.mark.parametrize(
    ("what", "recipe"),
    [("document", DOCUMENT), ("sealed", DOCUMENT), ("turn", TURN), ("resident", ROWS), ("slots", SLOTS)],
)
def test_killed_while_building(what: str, recipe: Recipe, tmp_path: Path) -> None:
    at_once, swept = tmp_path / "at once", tmp_path / "swept"
    keys = KEYS if what == "sealed" else None
    for root in each_crash(what, at_once):
        shutil.copytree(root, swept / root.name, symlinks=True)
    for roots, sweep_first in ((at_once, False), (swept, True)):
        done = [n for root in sorted(roots.iterdir()) if (n := finished(root, recipe, sweep_first, keys)) is not None]
        # The later the kill, the more is kept of a document; of a turn or of resident rows nothing needs to be.
        assert done == sorted(done)
        assert done[-1] == (2 if what in ("document", "sealed") else 0)


def finished(root: Path, recipe: Recipe, sweep_first: bool, keys: KeyRing | None) -> int | None:
    """Make a snapshot whole that a kill left; the blocks that were there, None where it was whole."""
    store = SnapshotStore(root, keys=keys)
    whole, n_done = found(store, recipe), None
    if sweep_first:
        kept = store.sweep().kept_builds
        assert not (whole and kept)
        assert store.usage() == sum(entry.nbytes for entry in store.entries())
        assert found(store, recipe) == whole
    if not whole:
        with recipe.begin(store) as builder:
            n_done = builder.n_blocks_done
            for records in recipe.blocks[builder.n_blocks_done :]:
                builder.append(records)
            builder.publish()
    assert found(store, recipe)
    expect_tidy(store, root)
    return n_done


def test_killed_while_replacing(tmp_path: Path) -> None:
    seen: list[bool] = []
    for root in each_crash("replacement", tmp_path):
        store = SnapshotStore(root)
        with store.open(KEY, FINGERPRINT, DOCUMENT.layout) as reader:
            is_new = reader.token_ids.tolist() == CHANGED.tokens
        seen.append(is_new)
        assert found(store, CHANGED if is_new else DOCUMENT), "one of the two is there at any time"
        expect_tidy(store, root)
        assert found(store, CHANGED if is_new else DOCUMENT)
    assert not seen[0]
    assert seen[-1]
    assert seen == sorted(seen)


@pytest.mark.parametrize("what", ["deletion", "quarantine"])
def test_killed_while_removing(what: str, tmp_path: Path) -> None:
    for root in each_crash(what, tmp_path):
        store = SnapshotStore(root)
        whole = found(store, DOCUMENT)
        assert whole or not published_rows(store), "what was made from a document never outlives it"
        expect_tidy(store, root)
        assert found(store, DOCUMENT) == whole
        DOCUMENT.build(store)
        assert found(store, DOCUMENT)
        store.delete(KEY)
        expect_tidy(store, root)
        assert store.entries() == []
        assert store.usage() == 0


def test_two_processes_build_it_once(tmp_path: Path) -> None:
    processes = [start("build-or-wait", tmp_path) for _ in range(3)]
    words = sorted(process.communicate(timeout=300)[0].strip() for process in processes)
    assert words == ["built", "waited", "waited"]
    assert [process.returncode for process in processes] == [0, 0, 0]
    expect_tidy(SnapshotStore(tmp_path), tmp_path)


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    process = start("hold", tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    store = SnapshotStore(tmp_path)
    assert store.sweep().kept_builds == [], "a build that runs is not touched and not reported"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    report = store.sweep()
    assert [name.key for name in report.kept_builds] == [KEY]
    assert list((tmp_path / "locks").iterdir()) == []
    with DOCUMENT.begin(store) as builder:
        assert builder.n_blocks_done == 1


def test_processes_share_one_budget(tmp_path: Path) -> None:
    one = SnapshotStore(tmp_path / "measure")
    with DOCUMENT.begin(one):
        reserved = one.usage()
    DOCUMENT.build(one)
    root = tmp_path / "shared"
    budget = reserved + 2 * one.usage() + 100  # room for a third build beside two finished ones
    processes = [start("build-within", root, str(budget), f"doc-{i}") for i in range(6)]
    words = [process.communicate(timeout=300)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * 6
    store = SnapshotStore(root)
    assert set(words) == {"fitted", "refused"}
    assert 1 <= words.count("fitted") == len(store.entries()) <= 3
    assert store.usage() <= budget
    assert all(verdict.ok for verdict in store.verify())
    expect_tidy(store, root)
