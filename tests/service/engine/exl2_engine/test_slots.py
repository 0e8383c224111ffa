"""Slots in the pool's blocks: where they lie, and attention over them by kernels and by plain torch."""

import random
from dataclasses import replace

import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine import portable_attend
from service.engine.exl2_engine.kernels.attend import DecodeConfig, Sums, attend
from service.engine.exl2_engine.pool import PoolExhausted
from service.engine.exl2_engine.rows import StepShape
from service.engine.exl2_engine.slots import DocumentSlots, n_slot_blocks
from tests.service.engine.exl2_engine.attention_cases import relative_error
from tests.service.engine.exl2_engine.slot_cases import filled_pool, hold, slot_case

TOLERANCE = 2e-3
UNEVEN = [[0, 300], [257, 1], [700, 256]]
OTHER = [[33, 0], [0, 0], [1, 65]]


def layout_of(kv_type=KVType.K8V4, head_dim=32, layers=3, heads=2):
    return KVLayout(layers, heads, head_dim, kv_type)


def check(case, layers=(2,), **options):
    """The kernels in some layers, plain torch in all of them."""
    for layer in range(3):
        reference = case.reference(layer)
        if layer in layers:
            assert relative_error(attend(*case.arguments(layer), **options), reference) < TOLERANCE
        found = portable_attend.attend(*case.arguments(layer, torch.float32))
        assert relative_error(found, reference) < 5e-6


@pytest.mark.parametrize("kv_type", list(KVType))
def test_each_head_sees_its_own_slots(kv_type):
    pool = filled_pool(layout_of(kv_type), 10)
    check(slot_case(pool, [(hold(pool, 300, UNEVEN), 2)], 3), layers=(0, 2))


@pytest.mark.parametrize("kv_type", [KVType.K8V4, KVType.K4V4])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_every_head_dim(kv_type, head_dim):
    pool = filled_pool(layout_of(kv_type, head_dim), 8)
    check(slot_case(pool, [(hold(pool, 256, OTHER), 1)], 2))


@pytest.mark.parametrize("peel", [False, True])
@pytest.mark.parametrize("sums", list(Sums))
def test_every_way_of_the_kernel(peel, sums):
    pool = filled_pool(layout_of(), 12)
    config = DecodeConfig(64, 4, 2, sums, peel=peel, registers=None, per_sm=1)
    one, other = hold(pool, 65, UNEVEN), hold(pool, 449, OTHER, seed=1)
    check(slot_case(pool, [(one, 1), (other, 3)], 1), config=config)


def test_documents_with_slots_and_without_stand_in_one_step():
    pool = filled_pool(layout_of(), 16)
    held = [hold(pool, 300, UNEVEN), hold(pool, 257, None, seed=1), hold(pool, 20, OTHER, seed=2)]
    check(slot_case(pool, [(held[1], 2), (held[0], 1), (None, 1), (held[2], 9)], 2))


def test_a_captured_graph_is_larger_than_its_step():
    pool = filled_pool(layout_of(), 12)
    groups = [(hold(pool, 300, OTHER), 1), (hold(pool, 1, None, seed=1), 1)]
    shape = StepShape(3, 3, 12, 3, 1024, 16, has_slots=True)
    check(slot_case(pool, groups, 2, shape=shape))
    alone = slot_case(pool, groups[1:], 2, shape=shape)
    assert alone.step.slot_first.tolist() == [0] * 3
    check(alone)


def test_plain_torch_reads_a_few_pages_at_a_time(monkeypatch):
    monkeypatch.setattr(portable_attend, "_DECODED_VALUES", 2 * 256 * 32)
    pool = filled_pool(layout_of(), 12)
    check(slot_case(pool, [(hold(pool, 300, UNEVEN), 2)], 3), layers=())


def test_without_slots_no_kernel_but_the_ordinary_one_runs():
    pool = filled_pool(layout_of(), 8)
    held = hold(pool, 300, [[0, 0]] * 3)
    assert (held.document.slots.first, len(held.document.block_ids)) == (0, 2)
    case = slot_case(pool, [(held, 2)], 2)
    assert case.step.slot_first is None
    check(case)


def test_slots_have_no_bias_and_must_be_there():
    pool = filled_pool(layout_of(), 8)
    case = slot_case(pool, [(hold(pool, 300, OTHER), 2)], 2)
    arguments = case.arguments(0)
    with pytest.raises(ValueError, match="must be given"):
        attend(*arguments[:-1])
    with pytest.raises(ValueError, match="no bias"):
        attend(*arguments[:-2], torch.zeros(8, 2, 256, dtype=torch.float16), arguments[-1])


@pytest.mark.parametrize("seed", range(20))
def test_blocks_hold_slots_however_they_are_spread(seed):
    rng = random.Random(seed)
    layout = layout_of(layers=rng.randint(1, 5), heads=rng.randint(1, 4))
    most = rng.choice([1, 255, 256, 257, 3000])
    counts = [[rng.choice([0, 1, rng.randint(0, most), most]) for _ in range(layout.n_kv_heads)]
              for _ in range(layout.n_layers)]  # fmt: skip
    slots, n = DocumentSlots.of(counts, layout, 3), sum(map(sum, counts))
    pages = [range(s, s + -(-c // 256)) for s, c in zip(slots.starts.ravel(), slots.counts.ravel(), strict=True)]
    used = [page for of_head in pages for page in of_head]
    assert used == list(range(len(used)))
    blocks, a_block = n_slot_blocks(layout, n), 256 * layout.n_layers * layout.n_kv_heads
    assert len(used) <= blocks * layout.n_layers * layout.n_kv_heads
    assert blocks <= n / a_block + 2
    assert (slots.n_slots, slots.most) == (n, max(map(max, counts)))


def test_a_pool_counts_and_frees_the_blocks_of_slots():
    pool = filled_pool(layout_of(), 7)
    held = hold(pool, 300, UNEVEN)
    n_slots = sum(map(sum, UNEVEN))
    assert held.document.nbytes == pool.document_nbytes(300, n_slots) == 4 * pool.block_nbytes
    assert (pool.n_free, len(held.document.blocks)) == (3, 2)
    with pytest.raises(ValueError, match="slots already"):
        pool.take_slots(held.document, OTHER)
    other = pool.take(300)
    with pytest.raises(PoolExhausted, match="slots: 2 blocks are needed, free are 1 of 7"):
        pool.take_slots(other, UNEVEN)
    assert (other.slots, other.nbytes) == (None, 2 * pool.block_nbytes)
    pool.give_back(held.document)
    assert (pool.n_free, held.document.slots, held.document.nbytes) == (5, None, 0)
    pool.take_slots(other, UNEVEN)
    assert pool.n_free == 3


def test_bounds_count_the_slots_of_the_longest_head():
    pool = filled_pool(layout_of(), 8)
    case = slot_case(pool, [(hold(pool, 300, UNEVEN), 2)], 2)
    assert case.step.max_tokens == 1000
    smaller = replace(case.step, max_tokens=1)
    assert relative_error(attend(smaller, *case.arguments(2)[1:]), case.reference(2)) < TOLERANCE
