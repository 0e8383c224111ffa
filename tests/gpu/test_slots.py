"""Attention over slots on a card against FP64, over poisoned memory: kernels, plain torch, and a captured graph."""

import random

import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine import portable_attend
from service.engine.exl2_engine.kernels.attend import attend
from service.engine.exl2_engine.rows import StepShape
from service.engine.exl2_engine.slots import n_slot_blocks
from tests.service.engine.exl2_engine.attention_cases import relative_error
from tests.service.engine.exl2_engine.slot_cases import filled_pool, hold, slot_case

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TOLERANCE = 2e-3


def checked(case, layers):
    for layer in layers:
        torch.full((1 << 26,), torch.nan, device="cuda")  # what the next tensors are made of
        reference = case.reference(layer)
        assert relative_error(attend(*case.arguments(layer)), reference) < TOLERANCE
        assert relative_error(portable_attend.attend(*case.arguments(layer)), reference) < TOLERANCE


def spread(layout, rng, most):
    return [[rng.choice([0, 1, rng.randint(0, most), most]) for _ in range(layout.n_kv_heads)]
            for _ in range(layout.n_layers)]  # fmt: skip


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("n_rows", [1, 3, 30, 300])
def test_slots_of_every_layout_for_few_rows_and_many(kv_type, head_dim, n_rows):
    layout = KVLayout(2, 4, head_dim, kv_type)
    counts = [[0, 300, 2000, 257], [1, 128, 64, 5000]]
    pool = filled_pool(layout, 3 + n_slot_blocks(layout, sum(map(sum, counts))), "cuda")
    checked(slot_case(pool, [(hold(pool, 600, counts), n_rows)], 5), range(2))


@pytest.mark.parametrize("seed", range(20))
def test_random_documents_with_and_without_slots(seed):
    rng = random.Random(seed)
    layout = KVLayout(rng.randint(1, 4), rng.choice([1, 2, 8]), rng.choice([64, 96, 128]), rng.choice(list(KVType)))
    wanted = [(rng.randint(1, 1500), rng.choice([None, spread(layout, rng, 1500)])) for _ in range(rng.randint(1, 3))]
    blocks = [layout.n_blocks(n) + n_slot_blocks(layout, sum(map(sum, counts or []))) for n, counts in wanted]
    pool = filled_pool(layout, sum(blocks), "cuda")
    groups = [(hold(pool, n, counts, i), rng.choice([1, 2, 9])) for i, (n, counts) in enumerate(wanted)]
    checked(slot_case(pool, [*groups, (None, 2)], rng.choice([1, 4, 5])), range(layout.n_layers))


def test_a_captured_graph_follows_slots_that_change():
    layout = KVLayout(2, 2, 128, KVType.K8V4)
    pool = filled_pool(layout, 40, "cuda")
    many, few = [[4000, 30], [0, 700]], [[1, 0], [257, 33]]
    held = [hold(pool, 700, many), hold(pool, 900, few, 1), hold(pool, 300, None, 2)]
    shape = StepShape(2, 2, 32, 2, 8192, 16, has_slots=True)
    pairs = [(held[0], held[1]), (held[2], held[0]), (held[1], held[2])]
    cases = [slot_case(pool, [(x, 1), (y, 1)], 5, shape=shape, seed=i) for i, (x, y) in enumerate(pairs)]
    static = cases[0]
    arguments = static.arguments(1)
    attend(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*arguments)
    for case in cases:
        for name in ("group_tokens", "slot_first", "block_tables", "group_rows"):
            getattr(static.step, name).copy_(getattr(case.step, name))
        for name in ("q", "tail_k", "tail_v"):
            getattr(static, name).copy_(getattr(case, name))
        out.fill_(torch.nan)
        graph.replay()
        assert relative_error(out, case.reference(1)) < TOLERANCE
