"""Decode attention on a card against FP64, over poisoned memory: kernels, plain torch, and a captured graph."""

import random
from dataclasses import replace

import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine import portable_attend
from service.engine.exl2_engine.kernels.attend import attend
from tests.service.engine.exl2_engine.attention_cases import Row, make_case, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TOLERANCE = 2e-3
LENGTHS = [1, 63, 64, 65, 255, 256, 257, 1023, 4097, 16384, 32769, 131071, 131072]


def poison():
    """Leave NaN in the memory that the next tensors are made of."""
    torch.full((1 << 26,), torch.nan, device="cuda")


def checked(case, **options):
    poison()
    error = relative_error(attend(*case.arguments(), **options), case.reference())
    assert error < TOLERANCE
    poison()
    assert relative_error(portable_attend.attend(*case.arguments()), case.reference()) < TOLERANCE


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize("tokens", LENGTHS)
def test_documents_of_every_length(kv_type, tokens):
    layout = KVLayout(1, 2, 128, kv_type)
    checked(make_case(layout, 5, [(tokens, [Row(0, 3), Row(1, 0)])], device="cuda", seed=tokens))


@pytest.mark.parametrize("seed", range(40))
def test_random_shapes_and_ragged_groups(seed):
    rng = random.Random(seed)
    layout = KVLayout(1, rng.choice([1, 2, 3, 8]), rng.choice([64, 96, 128, 256]), rng.choice(list(KVType)))
    groups, slot = [], 0
    for _ in range(rng.randint(1, 4)):
        rows = []
        for _ in range(rng.choice([0, 1, 1, 2, 3, 9])):
            end = rng.choice([0, 1, 63, 64, 65, 127, 128, 129, 700])
            rows += [Row(slot, end + i) for i in range(rng.choice([1, 1, 1, 2, 30]))]
            slot += 1
        groups.append((rng.choice([0, 1, rng.randint(1, 2000), 256 * rng.randint(1, 9) + rng.randint(-1, 1)]), rows))
    options = {"padding": rng.choice([0, 3]), "biased": rng.random() < 0.3, "tail_tokens": 800, "n_slots": slot + 1}
    if any(rows for _, rows in groups):
        checked(make_case(layout, rng.choice([1, 2, 4, 5, 7, 8]), groups, device="cuda", seed=seed, **options))


@pytest.mark.parametrize("group_heads", [1, 3, 16, 71, 128])
def test_ratios_of_heads(group_heads):
    layout = KVLayout(1, 1, 64, KVType.K8V4)
    checked(
        make_case(layout, group_heads, [(3000, [Row(0, 70), Row(0, 71), Row(1, 5)])], device="cuda", tail_tokens=80)
    )


def test_a_captured_graph_follows_lengths_and_tables_that_change():
    layout = KVLayout(1, 2, 128, KVType.K8V4)
    groups = [(5000, [Row(0, 100), Row(1, 30)]), (700, [Row(2, 64)])]
    case = make_case(layout, 5, groups, device="cuda", tail_tokens=128)
    step = replace(case.step, max_tokens=8192, max_tail=128, max_group_rows=3)
    arguments = (step, *case.arguments()[1:])
    attend(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*arguments)
    for new in ([4999, 700], [300, 1], [5000, 257], [0, 0]):
        step.group_tokens.copy_(torch.tensor(new))
        step.tail_end.copy_(torch.tensor([new[0] % 100, 7, 64]))
        documents = [(k[:, :n], v[:, :n], blocks) for (k, v, blocks), n in zip(case.documents, new, strict=True)]
        poison()
        out.fill_(torch.nan)
        graph.replay()
        assert relative_error(out, replace(case, documents=documents).reference()) < TOLERANCE


def test_the_same_call_gives_the_same_bits():
    case = make_case(KVLayout(1, 8, 128, KVType.K4V4), 5, [(9000, [Row(i, 40) for i in range(4)])], device="cuda")
    first = attend(*case.arguments())
    assert all(torch.equal(first, attend(*case.arguments())) for _ in range(5))
