"""A store in an empty directory and a small snapshot to put into it."""

from pathlib import Path

import pytest

from cache_store.store import SnapshotStore
from tests.cache_store.recipes import Recipe


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> SnapshotStore:
    return SnapshotStore(root)


@pytest.fixture
def recipe() -> Recipe:
    return Recipe()
