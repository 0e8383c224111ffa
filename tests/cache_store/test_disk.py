"""Limits of the process that reads snapshots; directories that several remove at once."""

import resource
import shutil
from pathlib import Path

import pytest

from cache_store.disk import Disk, allow_many_files
from cache_store.store import SnapshotStore
from tests.cache_store.recipes import Recipe


def test_as_many_files_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[0]), before[1]))
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
        allow_many_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_what_another_removes_too_is_gone_and_counted_once(
    root: Path, store: SnapshotStore, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file vanishes while its directory is removed by who counts anew: no part may stay for the other to subtract."""
    recipe.build(store)
    area, rmtree = store._area, shutil.rmtree
    doomed = area._move_to_trash(recipe.directory(root))
    assert doomed is not None

    def raced(path: Path) -> None:
        monkeypatch.undo()
        (path / "manifest.json").unlink()
        raise FileNotFoundError(path / "manifest.json")

    monkeypatch.setattr(area, "_empty", lambda path: None)
    monkeypatch.setattr(shutil, "rmtree", raced)
    assert area.recount() == 0
    assert shutil.rmtree is rmtree
    assert not doomed.exists()
    Disk().remove(doomed)
