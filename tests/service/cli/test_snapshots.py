"""`preread snapshots` over a store with a document in segments and its resident rows."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cache_store.store import SnapshotStore
from service.cli import main
from service.settings import Settings
from tests.cache_store.damage import flip, shard_paths
from tests.cache_store.recipes import RESIDENT, SEGMENTED


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREREAD_DATA_DIR", str(tmp_path))
    store = SnapshotStore(Settings(data_dir=tmp_path).store_dir)
    for recipe in (SEGMENTED, RESIDENT):
        recipe.build(store)
    return Settings(data_dir=tmp_path).store_dir


def snapshots(*arguments: str, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["snapshots", *arguments])
    assert result.exit_code == exit_code, result.output
    return result


def test_list_tells_segments_and_rows(root: Path) -> None:
    document, resident = snapshots("list").stdout.splitlines()
    assert document.startswith("document doc-1: published, ")
    assert document.endswith(", 43 tokens in 3 segments, k8v4")
    assert resident.startswith("resident doc-1: published, ")
    assert resident.endswith(", 19 rows, k8v4")
    rows = json.loads(snapshots("list", "--json").stdout)["snapshots"]
    assert [(row["kind"], row["n_tokens"], row["n_segments"]) for row in rows] == [
        ("document", 43, 3),
        ("resident", 19, 1),
    ]


def test_list_of_what_cannot_be_read(root: Path) -> None:
    (SEGMENTED.directory(root) / "manifest.json").write_bytes(b"")
    with SnapshotStore(root).begin(RESIDENT.key.of_kind("turn"), RESIDENT.fingerprint, RESIDENT.layout, [1]) as builder:
        lines = snapshots("list").stdout.splitlines()
        builder.abort()
    assert lines[0].startswith("document doc-1: published, ")
    assert "tokens" not in lines[0]
    assert lines[2].startswith("turn doc-1: building, ")


def test_verify_names_the_damaged_kind(root: Path) -> None:
    assert "2 snapshots checked, 0 damaged" in snapshots("verify").stderr
    flip(shard_paths(root, RESIDENT)[0], 1500)
    result = snapshots("verify", exit_code=1)
    assert result.stdout.startswith("resident doc-1: checksum: ")
    assert len(result.stdout.splitlines()) == 1
    damaged = json.loads(snapshots("verify", "--json", exit_code=1).stdout)
    assert [row["kind"] for row in damaged["snapshots"] if not row["ok"]] == ["resident"]
