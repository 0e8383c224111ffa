"""Reading in pieces: every record once and verified, in the order asked for, into memory that always comes back."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache_store.errors import MissReason, SnapshotMiss
from cache_store.keys import EntryName
from cache_store.layout import KVLayout, KVType
from cache_store.pieces import Order, Run, Span, plan_spans
from cache_store.reader import SnapshotReader
from cache_store.shards import plan_shards
from cache_store.store import SnapshotStore
from tests.cache_store.damage import flip, shard_paths
from tests.cache_store.recipes import FINGERPRINT, KEY, Recipe

WIDE = KVLayout(n_layers=4, n_kv_heads=2, head_dim=64, kv_type=KVType.K8V8)
N_TOKENS = 9 * 256 + 100


class Slots:
    """A few pieces of memory, which count who holds them; `returned` lets a test delay what is given back."""

    def __init__(self, n: int, piece_nbytes: int, n_readers: int = 4) -> None:
        self.piece_nbytes = piece_nbytes
        self.n_readers = n_readers
        self._free = [bytearray(piece_nbytes) for _ in range(n)]
        self._held: dict[int, bytearray] = {}
        self._changed = threading.Condition()
        self.most_held = 0

    @property
    def n_held(self) -> int:
        return len(self._held)

    def take(self, nbytes: int, *, wait: bool) -> memoryview | None:
        assert nbytes <= self.piece_nbytes
        with self._changed:
            while wait and not self._free:
                assert self._changed.wait(60), "nobody gives memory back"
            if not self._free:
                return None
            slot = self._free.pop()
            memory = memoryview(slot)[:nbytes]
            self._held[id(memory)] = slot
            self.most_held = max(self.most_held, len(self._held))
            return memory

    def give_back(self, memory: memoryview) -> None:
        with self._changed:
            self._free.append(self._held.pop(id(memory)))
            self._changed.notify()


@pytest.fixture
def wide(store: SnapshotStore) -> Recipe:
    recipe = Recipe(layout=WIDE, n_tokens=N_TOKENS)
    assert recipe.build(store).nbytes > 2 << 20
    return recipe


def copied(runs: list[Run]) -> list[tuple[int, int, bytes, int]]:
    return [(layer, first, bytes(records), n) for layer, first, records, n in runs]


@pytest.mark.parametrize("order", ["shard", "layer"])
@pytest.mark.parametrize("piece_nbytes", [1, 100_000, 300_000, 1 << 20, 64 << 20])
@pytest.mark.parametrize("shard_nbytes", [1, 700_000, 1_500_000, 64 << 20])
def test_spans_hold_every_record_once(order: Order, piece_nbytes: int, shard_nbytes: int) -> None:
    geometry = plan_shards(EntryName(KEY, FINGERPRINT.digest), WIDE, N_TOKENS, shard_nbytes=shard_nbytes)
    spans = plan_spans(geometry, piece_nbytes, order)
    seen = [(block, layer) for span in spans for layer in span.layers for block in span.blocks]
    assert sorted(seen) == [(b, n) for b in range(geometry.n_blocks) for n in range(WIDE.n_layers)]
    for span in spans:
        sizes = [WIDE.record_nbytes(geometry.block_length(block)) for block in span.blocks]
        assert span.nbytes == sum(sizes) * span.n_layers
        assert span.nbytes <= max(piece_nbytes, WIDE.record_nbytes(256))
        assert span.offset == geometry.record_offset(span.shard, span.first_block, span.first_layer)
        assert span.n_layers == 1 or span.blocks == range(
            span.shard.first_block, span.shard.first_block + span.shard.n_blocks
        )
    places = [(s.shard.index, s.offset) if order == "shard" else (s.first_layer, s.first_block) for s in spans]
    assert places == sorted(places)


@pytest.mark.parametrize("order", ["shard", "layer"])
@pytest.mark.parametrize("n_slots", [1, 2, 5, 40])
def test_pieces_come_in_order_through_few_slots(store: SnapshotStore, wide: Recipe, order: Order, n_slots: int) -> None:
    slots = Slots(n_slots, 200_000)
    runs: list[tuple[int, int, bytes, int]] = []
    with store.open(KEY, FINGERPRINT, WIDE) as reader:
        for piece in reader.pieces(slots, order):
            runs += copied(piece.runs)
            piece.release()
            piece.release()
    assert slots.n_held == 0
    assert slots.most_held <= n_slots
    assert wide.unpacked(runs) == wide.blocks
    if order == "layer":
        assert [run[0] for run in runs] == sorted(run[0] for run in runs)


def test_readers_that_share_few_slots_all_get_through(store: SnapshotStore, wide: Recipe) -> None:
    """Each takes memory only while it waits for no piece of its own, so they cannot block each other."""
    slots, found = Slots(3, 200_000), []

    def read() -> None:
        with store.open(KEY, FINGERPRINT, WIDE) as reader:
            runs: list[tuple[int, int, bytes, int]] = []
            for piece in reader.pieces(slots):
                runs += copied(piece.runs)
                piece.release()
            found.append(wide.unpacked(runs) == wide.blocks)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [True] * 4
    assert slots.n_held == 0


def test_what_is_left_in_the_middle_gives_its_memory_back(store: SnapshotStore, wide: Recipe) -> None:
    slots = Slots(6, 200_000)
    with store.open(KEY, FINGERPRINT, WIDE) as reader:
        first = next(iter(reader.pieces(slots)))
        first.release()
    assert slots.n_held == 0


def test_what_was_not_begun_is_not_read_any_more(
    store: SnapshotStore, wide: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, spans = Slots(40, 100_000, n_readers=1), []
    original = SnapshotReader._read

    def slow(self: SnapshotReader, span: Span, memory: memoryview) -> list[Run]:
        spans.append(span)
        time.sleep(0.05)
        return original(self, span, memory)

    monkeypatch.setattr(SnapshotReader, "_read", slow)
    with store.open(KEY, FINGERPRINT, WIDE) as reader:
        next(iter(reader.pieces(slots))).release()
    assert len(spans) <= 3
    assert slots.n_held == 0


def test_damage_half_way_is_a_miss_and_gives_the_memory_back(store: SnapshotStore, wide: Recipe, root: Path) -> None:
    (shard,) = shard_paths(root, wide)
    flip(shard, shard.stat().st_size // 2)
    slots, good = Slots(6, 200_000), []

    def read() -> None:
        with store.open(KEY, FINGERPRINT, WIDE) as reader:
            for piece in reader.pieces(slots):
                good.append(len(piece.runs))
                piece.release()

    with pytest.raises(SnapshotMiss) as miss:
        read()
    assert miss.value.reason is MissReason.CHECKSUM
    assert good
    assert slots.n_held == 0
    assert [e.state for e in store.entries()] == ["quarantined"]


def test_a_small_snapshot_is_read_without_threads(store: SnapshotStore, recipe: Recipe) -> None:
    recipe.build(store)
    slots = Slots(1, 1 << 20)
    before = set(threading.enumerate())
    with store.open(KEY, FINGERPRINT, recipe.layout) as reader:
        pieces: Iterator = reader.pieces(slots)
        piece = next(pieces)
        assert set(threading.enumerate()) <= before
        assert recipe.unpacked(copied(piece.runs)) == recipe.blocks
        piece.release()
    assert slots.n_held == 0


@pytest.mark.alone
def test_reading_and_verifying_costs_little_beside_reading(store: SnapshotStore, root: Path) -> None:
    """Best of five each, from the page cache: a ratio with much slack, for a machine that also does other work."""
    layout = KVLayout(n_layers=8, n_kv_heads=8, head_dim=128, kv_type=KVType.K8V8)
    recipe = Recipe(layout=layout, n_tokens=6 * 256)
    nbytes = recipe.build(store).nbytes
    slots = Slots(8, 8 << 20, n_readers=2)

    def plain() -> None:
        for path in shard_paths(root, recipe):
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def ours() -> None:
        with store.open(KEY, FINGERPRINT, layout) as reader:
            for piece in reader.pieces(slots):
                piece.release()

    buffer = bytearray(8 << 20)
    best = [min(seconds(work) for _ in range(5)) for work in (plain, ours)]
    assert best[1] < 8 * best[0] + 0.05, f"{nbytes / best[0] / 1e9:.1f} GB/s plain, {nbytes / best[1] / 1e9:.1f} ours"


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
