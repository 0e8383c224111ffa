"""Records into the blocks of a pool, and the ring of host memory they come through. Without a card: plain copies."""

import itertools
import threading

import numpy as np
import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.copies import CopyStream, HostRing
from service.engine.exl2_engine.restore import BlockLoader, adjacent, spread

CPU = torch.device("cpu")
LAYOUT = KVLayout(n_layers=2, n_kv_heads=3, head_dim=64, kv_type=KVType.K8V4)
BLOCK = LAYOUT.record_nbytes(256)


def make_loader(n_blocks: int = 12, layout: KVLayout = LAYOUT) -> tuple[list[torch.Tensor], BlockLoader]:
    """Pools full of what earlier documents left."""
    pools = [torch.full((n_blocks, layout.record_nbytes(256)), 0xFF, dtype=torch.uint8) for _ in range(layout.n_layers)]
    return pools, BlockLoader(pools, layout, CopyStream(CPU), ring_nbytes=1 << 20)


def record(layout: KVLayout, n_tokens: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(layout.record_nbytes(n_tokens))


def parts_of(layout: KVLayout, n_tokens: int, data: np.ndarray) -> list[np.ndarray]:
    """The four parts ``[heads, tokens, bytes]`` of a record, cut by the definition of the layout."""
    edges = np.cumsum([0, *layout.part_nbytes(n_tokens)])
    return [data[a:b].reshape(layout.n_kv_heads, n_tokens, -1) for a, b in itertools.pairwise(edges)]


def test_adjacent_numbers_go_together() -> None:
    assert list(adjacent([4, 5, 6, 9, 2, 3])) == [(4, 3), (9, 1), (2, 2)]
    assert list(adjacent([])) == []


@pytest.mark.parametrize("readonly", [True, False])
def test_whole_blocks_arrive_where_the_document_has_them(readonly: bool) -> None:
    pools, loader = make_loader()
    records = [record(LAYOUT, 256, i) for i in range(3)]
    joined = b"".join(records)
    loader.begin()
    loader.load([7, 1, 2, 3, 11], 1, 256, memoryview(joined if readonly else bytearray(joined)), 768)
    loader.end()
    for block, expected in zip((1, 2, 3), records, strict=True):
        assert pools[1][block].numpy().tobytes() == expected
    for block in (0, 4, 5, 6, 7, 8, 9, 10, 11):
        assert pools[1][block].eq(0xFF).all()
    assert pools[0].eq(0xFF).all()


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize("rest", [1, 17, 255])
def test_a_partial_block_gets_the_strides_of_a_whole_one(kv_type: KVType, rest: int) -> None:
    layout = KVLayout(n_layers=1, n_kv_heads=3, head_dim=64, kv_type=kv_type)
    pools, loader = make_loader(layout=layout)
    whole, last = record(layout, 256, 1), record(layout, rest, 2)
    loader.load([5, 2], 0, 0, memoryview(whole + last), 256 + rest)
    assert pools[0][5].numpy().tobytes() == whole
    found = parts_of(layout, 256, pools[0][2].numpy())
    for part, expected in zip(found, parts_of(layout, rest, np.frombuffer(last, np.uint8)), strict=True):
        np.testing.assert_array_equal(part[:, :rest], expected)
        assert not part[:, rest:].any()


def test_a_partial_block_decodes_to_what_the_record_does() -> None:
    """Through the codec: the spread block of 40 tokens has the same first 40 tokens as the tight record."""
    from cache_store.codec import decode_records, encode_records

    k, v = torch.randn(2, LAYOUT.n_kv_heads, 40, LAYOUT.head_dim)
    (tight,) = encode_records(k, v, LAYOUT)
    block = torch.empty(BLOCK, dtype=torch.uint8)
    spread(torch.frombuffer(bytearray(tight), dtype=torch.uint8), 40, LAYOUT, block)
    out = [torch.empty(LAYOUT.n_kv_heads, n, LAYOUT.head_dim) for n in (40, 40, 256, 256)]
    decode_records(torch.frombuffer(bytearray(tight), dtype=torch.uint8), 40, LAYOUT, out_k=out[0], out_v=out[1])
    decode_records(block, 256, LAYOUT, out_k=out[2], out_v=out[3])
    assert torch.equal(out[0], out[2][:, :40])
    assert torch.equal(out[1], out[3][:, :40])


@pytest.mark.parametrize(("blocks", "nbytes", "n_tokens"), [([1, 2], BLOCK - 1, 256), ([1], 2 * BLOCK, 512)])
def test_what_does_not_fit_is_refused(blocks: list[int], nbytes: int, n_tokens: int) -> None:
    pools, loader = make_loader()
    with pytest.raises(ValueError, match="are not"):
        loader.load(blocks, 0, 0, memoryview(bytearray(nbytes)), n_tokens)
    assert all(pool.eq(0xFF).all() for pool in pools)


def test_the_ring_hands_each_slot_to_one_holder_at_a_time() -> None:
    ring = HostRing(CopyStream(CPU), 1024, 3)
    held = [ring.take(1000, wait=False) for _ in range(3)]
    assert ring.take(1, wait=False) is None
    for i, memory in enumerate(held):
        assert memory is not None
        memory[:] = bytes([i]) * 1000
    assert [memory[0] for memory in held if memory is not None] == [0, 1, 2]
    assert held[1] is not None
    ring.give_back(held[1])
    again = ring.take(10, wait=True)
    assert again is not None
    assert again[0] == 1
    with pytest.raises(ValueError, match="do not fit"):
        ring.take(1025, wait=False)
    assert ring.n_free == 0


def test_who_waits_for_a_slot_gets_the_next_one() -> None:
    ring, got = HostRing(CopyStream(CPU), 64, 1), []
    first = ring.take(64, wait=True)
    assert first is not None
    waiting = threading.Thread(target=lambda: got.append(ring.take(8, wait=True)))
    waiting.start()
    ring.give_back(first)
    waiting.join(10)
    assert len(got[0]) == 8


def test_a_slot_is_used_again_only_behind_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is still going on keeps the slot; who must have one waits for the oldest copy."""
    copies = CopyStream(CPU)
    marks: list[SlowMark] = []
    monkeypatch.setattr(copies, "mark", lambda: marks.append(SlowMark()) or marks[-1])
    ring = HostRing(copies, 64, 2)
    one, two = ring.take(64, wait=False), ring.take(64, wait=False)
    assert one is not None
    assert two is not None
    ring.give_back(one)
    ring.give_back(two)
    assert ring.take(64, wait=False) is None
    assert ring.n_free == 0
    assert ring.take(64, wait=True) is not None
    assert [mark.waited for mark in marks] == [1, 0]


class SlowMark:
    """Passed only once somebody waited for it."""

    def __init__(self) -> None:
        self.waited = 0

    def passed(self) -> bool:
        return self.waited > 0

    def wait(self) -> None:
        self.waited += 1
