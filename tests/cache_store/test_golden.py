"""A snapshot written by format version 1 stays readable, and version 1 is still what is written."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_store.codec import decode_records, rotate
from cache_store.rows import take_rows
from cache_store.store import SnapshotStore
from tests.cache_store.golden import (
    DIRECTORY,
    LAYOUT,
    ROWS,
    SEGMENTS,
    SLOT,
    TOKENS,
    WINDOWED,
    encoded_golden,
    golden_kv,
    write_golden,
    write_windowed,
)
from tests.cache_store.recipes import CANARY, FINGERPRINT, KEY


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DIRECTORY, tmp_path / "golden"))


def files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "snapshots").rglob("*") if path.is_file()}


def files_by_place(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in (root / "snapshots").rglob("*") if p.is_file()}


def test_the_golden_snapshot_is_read(copy: Path) -> None:
    with SnapshotStore(copy).open(KEY, FINGERPRINT, LAYOUT) as reader:
        assert reader.token_ids.tolist() == TOKENS
        assert reader.canary == CANARY
        assert reader.manifest.created_at == 1.75e9
        for layer, first, records, n_tokens in reader.layers():
            assert (first, n_tokens) == (0, 11)
            out_k, out_v = torch.zeros(2, 1, 11, 32)
            decode_records(records, n_tokens, LAYOUT, out_k=out_k, out_v=out_v)
            k, v = golden_kv(layer)
            assert (out_k - k).abs().max() < 0.12
            assert (out_v - v).abs().max() < 1.5


def test_the_golden_records_mean_what_they_meant(copy: Path) -> None:
    """Exact values of one token: codes times scales, read by hand from the record's bytes."""
    with SnapshotStore(copy).open(KEY, FINGERPRINT, LAYOUT) as reader:
        ((_, _, records, n_tokens),) = reader.read_layer(1)
    out_k, out_v = torch.zeros(2, 1, 11, 32)
    decode_records(records, n_tokens, LAYOUT, out_k=out_k, out_v=out_v, rotated=True)
    codes = torch.frombuffer(records, dtype=torch.int8)[:32].float()
    scale = torch.frombuffer(records, dtype=torch.float16, offset=8 * 32, count=1).float()
    assert torch.equal(out_k[0, 0], codes * scale)
    torch.testing.assert_close(out_k[0, 0], rotate(golden_kv(1)[0])[0, 0], atol=0.04, rtol=0)


def test_the_golden_bytes_are_what_is_written_today(copy: Path, tmp_path: Path) -> None:
    write_golden(tmp_path / "new", encoded_golden())
    assert files(tmp_path / "new") == files(copy)


def test_a_golden_document_in_segments_is_read(tmp_path: Path) -> None:
    store = SnapshotStore(Path(shutil.copytree(WINDOWED, tmp_path / "golden")))
    with store.open(KEY, FINGERPRINT, LAYOUT, segments=SEGMENTS) as cold:
        assert (cold.next_position, cold.last_position, cold.canary) == (10, 4, CANARY)
        assert cold.manifest.blocks.first_position == [0, 2]
        with store.open(KEY.of_kind("resident"), FINGERPRINT, LAYOUT, context_digest="golden") as resident:
            assert (resident.next_position, resident.last_position, resident.canary) == (10, 4, CANARY)
            assert resident.token_ids.tolist() == [0 if row == SLOT else TOKENS[row] for row in ROWS]
            for (_, _, records, _), (_, _, rows, _) in zip(cold.layers(), resident.layers(), strict=True):
                assert b"".join(take_rows(records, 11, LAYOUT, np.array(ROWS))) == rows


def test_golden_segments_and_rows_are_what_is_written_today(tmp_path: Path) -> None:
    write_windowed(tmp_path / "new", encoded_golden())
    assert files_by_place(tmp_path / "new") == files_by_place(WINDOWED)
