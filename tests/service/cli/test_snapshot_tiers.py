"""`preread snapshots list` and `gc` over a disk and an object store on a path."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cache_store.store import SnapshotStore
from cache_store.tiers.opening import open_store
from cache_store.tiers.store import TieredStore
from service.cli import main
from service.core.snapshot_tier import tier_config
from service.db.migrations import upgrade
from service.settings import Settings
from tests.cache_store.recipes import KEY, Recipe


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("PREREAD_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("PREREAD_OBJECT_URL", f"file://{tmp_path}/objects")
    settings = Settings()
    asyncio.run(upgrade(settings.sqlalchemy_url))
    return settings


@pytest.fixture
def store(settings: Settings) -> TieredStore:
    store = open_store(settings.store_dir, tier_config(settings), uploads=False, clock=lambda: time.time() - 7200)
    assert isinstance(store, TieredStore)
    return store


def snapshots(*arguments: str, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["snapshots", *arguments])
    assert result.exit_code == exit_code, result.output
    return result


def test_list_tells_tiers_and_times(store: TieredStore) -> None:
    Recipe().build(store)
    store.uploader.send_noted()
    store.speeds.record_prefill(1000, 10.0)
    store.speeds.record_bytes("object", 10 << 20, 1.0)
    disk, far = snapshots("list").stdout.splitlines()
    assert disk.startswith("document doc-1: published, ")
    assert far.startswith("document doc-1 in object: published, ")
    assert far.endswith(", 43 tokens, k8v4, restore 0.00079 s, recompute 0.43 s")
    shown = json.loads(snapshots("list", "--json").stdout)
    assert [(row["tier"], row["restore_s"] is None) for row in shown["snapshots"]] == [
        ("disk", True),
        ("object", False),
    ]
    assert (shown["speeds"]["object"], shown["speeds"]["prefill"]) == (10 << 20, 100.0)
    assert "restoring is faster than computing above 18.8 KiB/s" in snapshots("list").stderr


def test_gc_removes_what_belongs_to_nobody(store: TieredStore, settings: Settings) -> None:
    Recipe().build(store)
    store.uploader.send_noted()
    for path in (settings.data_dir / "objects").rglob("*"):
        os.utime(path, (0, 0))
    told = snapshots("gc", "--dry-run")
    assert [line.partition(",")[0] for line in told.stdout.splitlines()] == [
        "alice/document/doc-1 in disk: would be removed (no document)",
        "alice/document/doc-1 in object: would be removed (no document)",
    ]
    assert Recipe().read(store) == Recipe().blocks
    report = json.loads(snapshots("gc", "--json").stdout)
    assert [(orphan["tier"], orphan["why"]) for orphan in report["orphans"]] == [("disk", "no document")]
    assert list(store.tiers[0].entries()) == []
    assert store.entries() == []
    assert store.places(KEY) == {}


def test_gc_leaves_what_is_young(settings: Settings) -> None:
    Recipe().build(open_store(settings.store_dir, tier_config(settings), uploads=False))
    assert "0 of no use, 1 sent, 0 still to be sent" in snapshots("gc").stderr
    assert [line.split(":")[0] for line in snapshots("list").stdout.splitlines()] == [
        "document doc-1",
        "document doc-1 in object",
    ]


def test_gc_sends_what_was_built_before_there_was_a_tier(settings: Settings) -> None:
    Recipe().build(SnapshotStore(settings.store_dir))
    assert "0 of no use, 1 to be sent" in snapshots("gc", "--dry-run").stderr
    assert "0 of no use, 1 sent, 0 still to be sent" in snapshots("gc").stderr
    assert " in object: published" in snapshots("list").stdout


@pytest.mark.parametrize(
    ("setting", "url", "message"),
    [
        ("PREREAD_REDIS_URL", "nonsense", "PREREAD_REDIS_URL: Redis URL must specify"),
        ("PREREAD_OBJECT_URL", "ftp://x/y", "PREREAD_OBJECT_URL: no object store has the address"),
    ],
)
def test_a_wrong_url_is_told_in_a_sentence(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, setting: str, url: str, message: str
) -> None:
    monkeypatch.setenv(setting, url)
    assert message in snapshots("list", exit_code=1).stderr


def test_a_missing_extra_is_told_in_a_sentence(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "cache_store.tiers.object", raising=False)
    result = snapshots("list", exit_code=1)
    assert (
        "PREREAD_OBJECT_URL is set, and obstore is not installed: run .venv/bin/pip install '.[object]' in Preread's"
        in result.stderr
    )


@pytest.mark.parametrize("command", [("gc", "--dry-run"), ("gc",), ("rebuild", "--dry-run")])
def test_without_a_database_nothing_is_judged(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """As on a worker's machine, which needs no database to serve."""
    monkeypatch.setenv("PREREAD_DATA_DIR", str(tmp_path / "elsewhere"))
    for _ in range(2):
        assert "PREREAD_DATABASE_URL" in snapshots(*command, exit_code=1).stderr
    snapshots("list")  # may leave an empty file
    assert "PREREAD_DATABASE_URL" in snapshots(*command, exit_code=1).stderr


def test_a_rebuild_is_not_judged_where_no_worker_ran(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREREAD_FLEET_URL", "redis://127.0.0.1:1/1")
    assert "No worker has run in" in snapshots("rebuild", "--dry-run", exit_code=1).stderr
