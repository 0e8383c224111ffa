"""Helpers that damage a snapshot, and what must then hold."""

from pathlib import Path

import pytest

from cache_store.errors import MissReason, SnapshotMiss
from cache_store.store import SnapshotStore
from tests.cache_store.recipes import Recipe


def expect_miss(store: SnapshotStore, recipe: Recipe, reason: MissReason, root: Path) -> str:
    """Reading misses with `reason`, the copy is set aside, a rebuild is right and leaves nothing behind."""
    with pytest.raises(SnapshotMiss) as miss:
        recipe.read(store)
    assert miss.value.reason is reason, miss.value
    (entry,) = [e for e in store.entries() if e.state == "quarantined"]
    assert (entry.name.key, entry.reason) == (recipe.key, str(reason))
    with pytest.raises(SnapshotMiss) as again:
        recipe.read(store)
    assert again.value.reason is MissReason.ABSENT
    recipe.build(store)
    assert recipe.read(store) == recipe.blocks
    expect_tidy(store, root)
    return miss.value.detail


def expect_tidy(store: SnapshotStore, root: Path) -> None:
    """After a sweep the accounting is right and no build, lock or trash is left."""
    assert store.sweep().used_nbytes == store.usage() == sum(entry.nbytes for entry in store.entries())
    for name in ("building", "locks", "trash"):
        assert list((root / name).iterdir()) == []


def shard_paths(root: Path, recipe: Recipe) -> list[Path]:
    return sorted(recipe.directory(root).glob("shard-*"))


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
