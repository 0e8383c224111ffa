"""A manifest is untrusted input: damaged, impossible, enormous or from another version, it is a miss."""

import os
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from cache_store.errors import MissReason, SnapshotMiss
from cache_store.layout import KVLayout, KVType
from cache_store.manifest import Manifest, encode_manifest
from cache_store.store import SnapshotStore
from cache_store.stored import MANIFEST_LIMIT, decode_manifest, read_manifest
from tests.cache_store.damage import expect_miss, flip
from tests.cache_store.recipes import FINGERPRINT, KEY, LAYOUT, Recipe
from tests.cache_store.rewrite import rewrite


def test_a_flipped_bit_anywhere_in_the_manifest(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    recipe.build(store)
    path = recipe.directory(root) / "manifest.json"
    data = path.read_bytes()
    for offset in range(len(data)):
        broken = bytearray(data)
        broken[offset] ^= 1 << offset % 8
        with pytest.raises(SnapshotMiss) as miss:
            decode_manifest(bytes(broken))
        assert miss.value.reason is MissReason.CHECKSUM, offset
    for length in range(1, len(data)):
        with pytest.raises(SnapshotMiss):
            decode_manifest(data[:length])
    flip(path, len(data) // 2)
    expect_miss(store, recipe, MissReason.CHECKSUM, root)


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 2},
        {"format_version": 0},
        {"sections": {"biases": {"bias": []}}},
        {"sections": {"something": 1}},
        {"payload": "opaque"},
        {"a_later_field": 1},
        {"layout": {"layout_version": 2, "n_layers": "many"}},
        {"fingerprint": {"weights": "w1", "sparsity": "2:4"}},
        {"next_position": 42},
    ],
    ids=str,
)
def test_another_format_version(store: SnapshotStore, recipe: Recipe, root: Path, change: dict[str, object]) -> None:
    recipe.build(store)
    rewrite(root, recipe, lambda body: body.update(change))
    expect_miss(store, recipe, MissReason.VERSION, root)


@pytest.mark.parametrize(
    "change",
    [
        {"n_tokens": 1 << 60},
        {"n_tokens": 1 << 30},
        {"n_tokens": 0},
        {"n_tokens": -5},
        {"n_tokens": 44},
        {"n_tokens": "43"},
        {"n_tokens": 43.5},
        {"checksums": ""},
        {"checksums": "AAAA" * 1000},
        {"shard_nbytes": []},
        {"shard_nbytes": [1 << 40]},
        {"shard_nbytes": [7328, 7328]},
        {"blocks": {"first_position": [], "segment": [], "n_tokens": []}},
        {"blocks": {"first_position": [0] * 6, "segment": [0] * 6, "n_tokens": [8] * 6}},
        {"owner_id": "bob"},
        {"owner_id": "../bob"},
        {"id": "doc-2"},
        {"kind": "turn"},
        {"kind": "resident"},
        {"token_digest": "0" * 32},
        {"sections": {"canary": {"token_ids": "x"}}},
        {"layout": {"n_layers": 1 << 40, "layout_version": 1}},
        {"sections": []},
        {"format_version": "one"},
    ],
    ids=lambda change: str(change)[:60],
)
def test_impossible_numbers_in_a_manifest_with_a_right_checksum(
    store: SnapshotStore, recipe: Recipe, root: Path, change: dict[str, object]
) -> None:
    recipe.build(store)
    rewrite(root, recipe, lambda body: body.update(change))
    expect_miss(store, recipe, MissReason.CHECKSUM, root)


@pytest.mark.parametrize("data", [b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"xxh3":1,"body":{}}'])
def test_a_manifest_that_is_none(store: SnapshotStore, recipe: Recipe, root: Path, data: bytes) -> None:
    recipe.build(store)
    (recipe.directory(root) / "manifest.json").write_bytes(data)
    expect_miss(store, recipe, MissReason.CHECKSUM, root)


def test_a_manifest_of_a_gigabyte_is_not_read(store: SnapshotStore, recipe: Recipe, root: Path) -> None:
    recipe.build(store)
    path = recipe.directory(root) / "manifest.json"
    os.truncate(path, 1 << 30)
    tracemalloc.start()
    with path.open("rb") as file, pytest.raises(SnapshotMiss) as miss:
        read_manifest(file.fileno(), 1 << 30)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert miss.value.reason is MissReason.CHECKSUM
    with pytest.raises(SnapshotMiss):
        store.open(KEY, FINGERPRINT, LAYOUT)
    store.delete(KEY)


def test_the_largest_manifest_fits_its_limit() -> None:
    """A million tokens of an 80-layer model."""
    layout = KVLayout(n_layers=80, n_kv_heads=8, head_dim=128, kv_type=KVType.K8V4)
    n_blocks = layout.n_blocks(1 << 20)
    assert 11 * n_blocks * layout.n_layers + 60 * n_blocks < MANIFEST_LIMIT // 4


def test_a_manifest_round_trip_keeps_optional_fields(store: SnapshotStore, recipe: Recipe) -> None:
    manifest = recipe.build(store)
    full: Manifest = msgspec.structs.replace(manifest, page_map=[(0, 20), (20, 43)])
    assert decode_manifest(encode_manifest(full)) == full
