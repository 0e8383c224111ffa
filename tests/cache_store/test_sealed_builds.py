"""Encrypted builds that are cut, and taken up: nothing is computed again, and no key and nonce seal twice."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cache_store.errors import MissReason, SnapshotMiss
from cache_store.keyring import KeyRing
from cache_store.manifest import Manifest, SealedRun, encode_manifest
from cache_store.store import SnapshotStore
from cache_store.stored import decode_manifest
from cache_store.tiers.memory import MemoryTier
from cache_store.tiers.store import TieredStore
from tests.cache_store.recipes import CANARY, Recipe

KEYS, OTHERS = KeyRing(bytes(range(32))), KeyRing(bytes(range(1, 33)))
RECIPE = Recipe()
N_BLOCKS = len(RECIPE.blocks)


@pytest.fixture
def store(root: Path) -> SnapshotStore:
    return SnapshotStore(root, keys=KEYS)


def build_up_to(store: SnapshotStore, n_blocks: int) -> int:
    """Write blocks until there are so many, and leave; how many there were."""
    with RECIPE.begin(store) as builder:
        n_done = builder.n_blocks_done
        for records in RECIPE.blocks[n_done:n_blocks]:
            builder.append(records)
        assert [builder.block_records(block) for block in range(n_done)] == RECIPE.blocks[:n_done]
    return n_done


def journal_of(root: Path) -> Path:
    (path,) = (root / "building").glob("*.journal")
    return path


def stored_records(root: Path, block: int) -> bytes:
    """The bytes of a block's first record as they lie in the only shard of a build."""
    (path,) = (root / "building").glob("*/shard-0000.safetensors")
    data = path.read_bytes()
    at = int.from_bytes(data[:8], "little") + 8 + 4 * RECIPE.n_tokens
    nbytes = RECIPE.layout.record_nbytes(RECIPE.layout.block_tokens)
    return data[at + block * nbytes : at + (block + 1) * nbytes]


def runs_of(manifest: Manifest) -> list[int]:
    return [run.first_block for run in manifest.sealed_runs]


def test_a_build_goes_on_where_it_was_cut(store: SnapshotStore, root: Path) -> None:
    assert [build_up_to(store, n) for n in (0, 2, 2, 5, N_BLOCKS)] == [0, 0, 2, 2, 5]
    manifest = RECIPE.build(SnapshotStore(root, keys=KEYS))
    assert runs_of(manifest) == [0, 2, 5, N_BLOCKS]
    assert manifest.sealed is not None
    salts = [manifest.sealed.salt, *(run.salt for run in manifest.sealed_runs)]
    assert len(set(salts)) == 5
    assert RECIPE.read(store) == RECIPE.blocks
    with store.open(RECIPE.key, RECIPE.fingerprint, RECIPE.layout) as reader:
        assert reader.canary == CANARY
    assert store.usage() == sum(entry.nbytes for entry in store.entries())


def test_what_is_written_again_is_sealed_anew(store: SnapshotStore, root: Path) -> None:
    """A block that reached the disk and not the journal: sealed as before, other bytes would give the key away."""
    build_up_to(store, 2)
    before = stored_records(root, 1)
    assert before != RECIPE.blocks[1][0]
    path = journal_of(root)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert build_up_to(store, 3) == 1
    assert stored_records(root, 1) != before
    RECIPE.build(store)
    assert RECIPE.read(store) == RECIPE.blocks


@pytest.mark.parametrize("line", ["block", "tokens", "run"])
def test_a_damaged_journal_costs_what_it_says(store: SnapshotStore, root: Path, line: str) -> None:
    build_up_to(store, 3)
    build_up_to(store, 5)
    path = journal_of(root)
    lines = path.read_bytes().splitlines(keepends=True)
    at = {"tokens": 1, "block": 3, "run": 5}[line]
    lines[at] = lines[at].replace(b'"', b"'", 1)
    path.write_bytes(b"".join(lines))
    assert build_up_to(store, 5) == {"tokens": 0, "block": 1, "run": 3}[line]
    RECIPE.build(store)
    assert RECIPE.read(store) == RECIPE.blocks


def test_a_damaged_record_and_tokens_of_another_build_are_noticed(store: SnapshotStore, root: Path) -> None:
    build_up_to(store, 4)
    (path,) = (root / "building").glob("*/shard-0000.safetensors")
    data = bytearray(path.read_bytes())
    data[data.index(stored_records(root, 2))] ^= 1
    path.write_bytes(data)
    assert build_up_to(store, 4) == 2
    data = bytearray(path.read_bytes())
    data[int.from_bytes(data[:8], "little") + 9] ^= 1
    path.write_bytes(data)
    assert build_up_to(store, 4) == 0


@pytest.mark.parametrize(("before", "after"), [(KEYS, OTHERS), (KEYS, None), (None, KEYS)])
def test_a_build_of_another_key_is_begun_anew(root: Path, before: KeyRing | None, after: KeyRing | None) -> None:
    build_up_to(SnapshotStore(root, keys=before), 3)
    store = SnapshotStore(root, keys=after)
    assert build_up_to(store, 2) == 0
    RECIPE.build(store)
    assert RECIPE.read(store) == RECIPE.blocks


def with_runs(change: Callable[[list[SealedRun]], list[SealedRun]]) -> Callable[[Manifest], Manifest]:
    def changed(manifest: Manifest) -> Manifest:
        section = msgspec.Raw(msgspec.json.encode(change(manifest.sealed_runs)))
        return msgspec.structs.replace(manifest, sections=manifest.sections | {"sealed_runs": section})

    return changed


@pytest.mark.parametrize(
    "change",
    [
        lambda runs: [],
        lambda runs: runs[:1],
        lambda runs: runs[::-1],
        lambda runs: [msgspec.structs.replace(runs[0], first_block=3), *runs[1:]],
        lambda runs: [msgspec.structs.replace(runs[0], salt=bytes(16)), *runs[1:]],
        lambda runs: [msgspec.structs.replace(runs[0], salt=b"short"), *runs[1:]],
    ],
)
def test_other_runs_do_not_open(
    store: SnapshotStore, root: Path, change: Callable[[list[SealedRun]], list[SealedRun]]
) -> None:
    build_up_to(store, 2)
    build_up_to(store, 4)
    RECIPE.build(store)
    path = RECIPE.directory(root) / "manifest.json"
    path.write_bytes(encode_manifest(with_runs(change)(decode_manifest(path.read_bytes()))))
    with pytest.raises(SnapshotMiss) as caught:
        RECIPE.read(store)
    assert caught.value.reason is MissReason.CHECKSUM


def test_tiers_bring_a_build_that_was_taken_up(root: Path, tmp_path: Path) -> None:
    far = MemoryTier("far", durable=True)
    here, there = (TieredStore(path, [far], uploads=False, keys=KEYS) for path in (root, tmp_path / "there"))
    build_up_to(here, 3)
    RECIPE.build(here)
    here.uploader.send_noted()
    assert RECIPE.read(there) == RECIPE.blocks
    for each in (here, there):
        each.close()
