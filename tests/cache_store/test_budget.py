"""Budgets and full disks: refused before anything is written, with numbers, and nothing is left behind."""

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cache_store.area import DIRECTORIES
from cache_store.errors import BudgetExceeded, MissReason, SnapshotMiss, StorageFailed
from cache_store.keys import SnapshotKey
from cache_store.store import SnapshotStore
from tests.cache_store.recipes import FINGERPRINT, KEY, Recipe, StepDisk

MB = 1 << 20


def tree(root: Path) -> set[str]:
    """Everything in a store but its lock and its number."""
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.name not in ("usage", "store.lock")}


def reservation(tmp_path: Path, recipe: Recipe) -> int:
    store = SnapshotStore(tmp_path / "measure")
    with recipe.begin(store):
        return store.usage()


def test_larger_than_the_whole_budget(root: Path, recipe: Recipe) -> None:
    store = SnapshotStore(root, budget_nbytes=1000)
    before = tree(root)
    with pytest.raises(BudgetExceeded, match="larger than the whole budget of 1000") as error:
        recipe.begin(store)
    assert error.value.needed_nbytes > 7000
    assert error.value.available_nbytes == 1000
    assert tree(root) == before


def test_refused_before_the_write_and_admitted_after_a_deletion(root: Path, tmp_path: Path, recipe: Recipe) -> None:
    store = SnapshotStore(root, budget_nbytes=int(1.5 * reservation(tmp_path, recipe)))
    other = replace(recipe, key=SnapshotKey("bob", "document", "b"))
    recipe.build(store)
    store.pin(KEY, True)
    before = tree(root)
    with pytest.raises(BudgetExceeded, match="are available") as error:
        other.begin(store)
    assert error.value.needed_nbytes > error.value.available_nbytes > 0
    assert tree(root) == before
    store.delete(KEY)
    other.build(store)
    assert other.read(store) == other.blocks


def test_a_build_reserves_its_room_at_once(root: Path, tmp_path: Path, recipe: Recipe) -> None:
    store = SnapshotStore(root, budget_nbytes=int(1.5 * reservation(tmp_path, recipe)))
    with recipe.begin(store) as builder:
        used = store.usage()
        with pytest.raises(BudgetExceeded):
            replace(recipe, key=SnapshotKey("bob", "document", "b")).begin(store)
        for records in recipe.blocks:
            builder.append(records)
            assert store.usage() == used
        builder.publish()
    assert store.usage() < used
    assert store.usage() == store.sweep().used_nbytes


def test_a_free_space_floor(root: Path, recipe: Recipe) -> None:
    free = 100 * MB
    store = SnapshotStore(root, free_floor_nbytes=100 * MB, free=lambda _: free)
    with pytest.raises(BudgetExceeded, match="of which 104857600 stay free") as error:
        recipe.begin(store)
    assert error.value.available_nbytes == 0
    free = 101 * MB
    recipe.build(store)
    assert recipe.read(store) == recipe.blocks


def test_accounting_is_rebuilt_from_the_disk(root: Path, recipe: Recipe) -> None:
    store = SnapshotStore(root)
    recipe.build(store)
    used = store.usage()
    for wrong in ("0", "123456789", "", "many"):
        (root / "usage").write_text(wrong)
        assert SnapshotStore(root).sweep().used_nbytes == used
    (root / "usage").unlink()
    assert SnapshotStore(root).usage() == used


def test_a_damaged_copy_makes_room_for_its_replacement(root: Path, tmp_path: Path, recipe: Recipe) -> None:
    store = SnapshotStore(root, budget_nbytes=int(1.5 * reservation(tmp_path, recipe)))
    for _ in range(4):
        recipe.build(store)
        shard = next(recipe.directory(root).glob("shard-*"))
        os.truncate(shard, shard.stat().st_size - 1)
        with pytest.raises(SnapshotMiss):
            recipe.read(store)
    recipe.build(store)
    assert recipe.read(store) == recipe.blocks
    assert store.sweep().used_nbytes <= int(1.5 * reservation(tmp_path, recipe))


def test_one_quarantined_copy_is_kept_of_a_snapshot(root: Path, recipe: Recipe) -> None:
    store = SnapshotStore(root)
    for detail in ("first", "second"):
        recipe.build(store)
        store.quarantine(KEY, FINGERPRINT.digest, MissReason.CANARY, detail)
    store.quarantine(KEY, FINGERPRINT.digest, MissReason.CANARY, "there is none now")
    assert [e.state for e in store.entries()] == ["quarantined"]
    (note,) = (root / "quarantine").glob("*.json")
    assert "second" in note.read_text()
    assert store.sweep().used_nbytes == store.usage()


class Failing(StepDisk):
    """A disk that is full from its `first` step on, for `times` steps."""

    def __init__(self, first: int, times: int = 1) -> None:
        self.left = first
        self.times = times
        self.failed = False
        super().__init__(self._step)

    def _step(self, name: str) -> None:
        self.left -= 1
        # Removing needs no room: a full disk lets it pass.
        if -self.times <= self.left < 0 and name not in ("remove", "rename", "truncate", "exchange"):
            self.failed = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def build_on(store: SnapshotStore, recipe: Recipe) -> StorageFailed | None:
    try:
        recipe.build(store)
    except StorageFailed as failure:
        return failure
    return None


def expect_whole_or_absent(store: SnapshotStore, recipe: Recipe) -> None:
    try:
        read = recipe.read(store)
    except SnapshotMiss as miss:
        if miss.reason is not MissReason.ABSENT:
            raise
    else:
        assert read == recipe.blocks


@pytest.mark.parametrize("kind", ["document", "turn"])
@pytest.mark.parametrize("times", [1, 1000])
def test_a_disk_that_is_full_at_any_step(root: Path, recipe: Recipe, kind: str, times: int) -> None:
    recipe = replace(recipe, key=replace(KEY, kind=kind), n_tokens=12)
    healthy = SnapshotStore(root)
    for step in range(1000):
        disk = Failing(step + len(DIRECTORIES), times)
        failure = build_on(SnapshotStore(root, disk=disk), recipe)
        assert (failure is not None) == disk.failed, f"step {step}: {failure}"
        expect_whole_or_absent(healthy, recipe)
        if disk.left >= 0:
            break
        recipe.build(healthy)
        assert recipe.read(healthy) == recipe.blocks
        healthy.sweep()
        for name in ("building", "locks", "trash"):
            assert list((root / name).iterdir()) == []
        healthy.delete(recipe.key)
        assert healthy.usage() == 0
    assert step > 15


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KB, or, where none can be mounted, a limit of 256 KB on each file."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0:
        yield path
        subprocess.run(["umount", str(path)], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, hard))
    yield path
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_really_full(small_disk: Path, recipe: Recipe) -> None:
    store = SnapshotStore(small_disk, free=lambda _: 1 << 40)
    recipe.build(store)
    before, used = tree(small_disk), store.usage()
    large = replace(recipe, key=SnapshotKey("alice", "document", "large"), n_tokens=4000)
    for _ in range(3):
        with pytest.raises(StorageFailed, match=r"No space left on device|File too large"):
            large.build(store)
    assert tree(small_disk) == before
    assert store.usage() == used
    assert recipe.read(store) == recipe.blocks


def test_a_store_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, match="preparing the snapshot store"):
        SnapshotStore(tmp_path / "file")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "building").symlink_to(tmp_path)
    with pytest.raises(StorageFailed, match="not a directory"):
        SnapshotStore(tmp_path / "store")
