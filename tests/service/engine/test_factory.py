"""What happens when an engine is made, whatever its kind."""

import logging
from pathlib import Path

import pytest

from cache_store.errors import StorageFailed
from cache_store.store import SnapshotStore
from service.engine.factory import EngineConfig, open_host


def test_what_a_killed_engine_left_is_removed_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    SnapshotStore(tmp_path)
    (tmp_path / "trash" / "half-removed").mkdir()
    (tmp_path / "building" / "unknown").mkdir()
    (tmp_path / "building" / "unknown" / "shard").write_bytes(b"x" * 100)
    with caplog.at_level(logging.INFO, "service.engine.factory"):
        open_host(EngineConfig(store_dir=str(tmp_path), engine="fake")).close()
    assert [list((tmp_path / name).iterdir()) for name in ("trash", "building")] == [[], []]
    assert "removed 2 leftovers of the snapshot store, 100 bytes" in caplog.text


def test_a_store_that_cannot_be_put_in_order_still_opens(tmp_path, caplog, monkeypatch):
    def failing(*_):
        raise StorageFailed("sweeping the snapshot store: Input/output error")

    monkeypatch.setattr(SnapshotStore, "sweep", failing)
    open_host(EngineConfig(store_dir=str(tmp_path), engine="fake")).close()
    assert "was not put in order: sweeping the snapshot store: Input/output error" in caplog.text


def test_an_unknown_engine_is_named(tmp_path):
    with pytest.raises(ValueError, match="no engine 'magic'"):
        open_host(EngineConfig(store_dir=str(tmp_path), engine="magic"))
