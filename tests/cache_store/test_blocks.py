"""Reading some blocks: the very bytes, nothing else is read, and damage is found where it is."""

import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cache_store import reader as reader_module
from cache_store import subject as subject_module
from cache_store.disk import read_into
from cache_store.errors import MissReason, SnapshotMiss
from cache_store.keys import EntryName
from cache_store.layout import KVLayout, KVType
from cache_store.pieces import block_spans
from cache_store.rows import take_rows
from cache_store.shards import plan_shards
from cache_store.store import SnapshotStore
from tests.cache_store.damage import flip, shard_paths
from tests.cache_store.recipes import FINGERPRINT, KEY, LAYOUT, SEGMENTED, Recipe

WIDE = KVLayout(n_layers=4, n_kv_heads=2, head_dim=64, kv_type=KVType.K8V8)
ASKED = [[], [0], [5], [2, 3, 4], [4, 0, 5, 2], [1, 1, 0], list(range(6))]


@pytest.fixture(params=[1, 1500, 3000, 64 << 20], ids=["one record a shard", "split layers", "few blocks", "one shard"])
def shard_nbytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (reader_module, subject_module):
        monkeypatch.setattr(module, "plan_shards", partial(plan_shards, shard_nbytes=request.param))
    return request.param


@pytest.mark.parametrize("threshold", [0, 1 << 20], ids=["threads", "inline"])
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_the_blocks_asked_for(
    store: SnapshotStore, shard_nbytes: int, asked: list[int], threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_store.readahead._TOGETHER_NBYTES", threshold)
    SEGMENTED.build(store)
    assert len(list(store.entries())) == 1
    blocks = SEGMENTED.blocks
    with store.open(KEY, FINGERPRINT, LAYOUT) as reader:
        found = reader.read_blocks(asked)
        assert [[bytes(record) for record in block] for block in found] == [blocks[i] for i in asked]
        again = reader.read_blocks(asked)
    assert found == again, "another read does not touch what an earlier one gave"


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_nothing_else_is_read(
    store: SnapshotStore, shard_nbytes: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    SEGMENTED.build(store)
    nbytes: list[int] = []

    def counted(fd: int, buffer: memoryview, offset: int) -> int:
        nbytes.append(len(buffer))
        return read_into(fd, buffer, offset)

    with store.open(KEY, FINGERPRINT, LAYOUT) as reader:
        monkeypatch.setattr(reader_module, "read_into", counted)
        reader.read_blocks(asked)
    lengths = LAYOUT.block_lengths(43)
    assert sum(nbytes) == sum(LAYOUT.record_nbytes(lengths[i]) * LAYOUT.n_layers for i in set(asked))


def test_neighbours_are_read_at_once() -> None:
    geometry = plan_shards(EntryName(KEY, FINGERPRINT.digest), LAYOUT, 43)
    spans = block_spans(geometry, [5, 1, 3, 2])
    assert [(s.first_layer, s.first_block, s.n_blocks) for s in spans] == [
        (layer, *row) for layer in range(3) for row in ((1, 3), (5, 1))
    ]


@pytest.mark.parametrize("wrong", [[-1], [6], [0, 6], [-1, 0]])
def test_blocks_that_are_none(store: SnapshotStore, recipe: Recipe, wrong: list[int]) -> None:
    recipe.build(store)
    with store.open(KEY, FINGERPRINT, LAYOUT) as reader, pytest.raises(ValueError, match="among 6"):
        reader.read_blocks(wrong)
    assert [e.state for e in store.entries()] == ["published"]


@pytest.mark.parametrize("threshold", [0, 1 << 20], ids=["threads", "inline"])
@pytest.mark.parametrize("damage", ["flip", "shrink"])
@pytest.mark.parametrize("layer", range(3))
def test_damage_is_a_miss_for_whoever_asks_for_it(
    store: SnapshotStore, root: Path, layer: int, damage: str, threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_store.readahead._TOGETHER_NBYTES", threshold)
    SEGMENTED.build(store)
    (path,) = shard_paths(root, SEGMENTED)
    plan = plan_shards(EntryName(KEY, FINGERPRINT.digest), LAYOUT, 43)
    with store.open(KEY, FINGERPRINT, LAYOUT) as reader:
        at = plan.record_offset(plan.shards[0], 4, layer)
        if damage == "flip":
            flip(path, at + 100, 3)
            others = [0, 1, 2, 3, 5]
            assert [[bytes(r) for r in b] for b in reader.read_blocks(others)] == [SEGMENTED.blocks[i] for i in others]
        else:
            with path.open("r+b") as file:
                file.truncate(at + 100)
        with pytest.raises(SnapshotMiss) as miss:
            reader.read_blocks([2, 4])
    assert miss.value.reason is (MissReason.CHECKSUM if damage == "flip" else MissReason.TRUNCATED)
    (entry,) = store.entries()
    assert (entry.state, entry.reason) == ("quarantined", str(miss.value.reason))
    SEGMENTED.build(store)
    with store.open(KEY, FINGERPRINT, LAYOUT) as reader:
        assert bytes(reader.read_blocks([4])[0][layer]) == SEGMENTED.blocks[4][layer]


def test_several_threads_may_ask_at_once(store: SnapshotStore) -> None:
    recipe = Recipe(layout=WIDE, n_tokens=9 * 256 + 100)
    recipe.build(store)
    blocks, right = recipe.blocks, []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(10):
            asked = rng.choice(10, 4, replace=False).tolist()
            found = reader.read_blocks(asked)
            right.append([[bytes(r) for r in block] for block in found] == [blocks[i] for i in asked])

    with store.open(KEY, FINGERPRINT, WIDE) as reader:
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert right == [True] * 40


def test_rows_of_fetched_blocks_are_those_of_the_document(store: SnapshotStore) -> None:
    """What a question does: some spans of a document, by their blocks, as rows."""
    SEGMENTED.build(store)
    spans, asked = [(9, 14), (33, 43)], [1, 4, 5]
    local = np.array([*range(1, 6), *range(9, 19)])
    with store.open(KEY, FINGERPRINT, LAYOUT) as reader:
        found = reader.read_blocks(asked)
        for layer in range(LAYOUT.n_layers):
            (run,) = reader.read_layer(layer)
            rows = np.concatenate([np.arange(*span) for span in spans])
            whole = take_rows(run[2], 43, LAYOUT, rows)
            some = take_rows([block[layer] for block in found], 8 + 8 + 3, LAYOUT, local)
            assert b"".join(some) == b"".join(whole)
