"""On the card: attention of document chunks against FP64, with every kernel of torch that this card has."""

import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine import sdpa
from service.engine.exl2_engine.backends import select_backend
from service.engine.exl2_engine.sdpa import Method
from tests.service.engine.exl2_engine.prefill_cases import chunk, exact_prefill

pytestmark = pytest.mark.gpu
HALF = torch.float16


def error(out, expected):
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("choice", ["triton", "portable"])
@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize(("n_past", "n"), [(0, 1), (0, 2048), (256, 33), (6400, 1000), (6144, 2048)])
def test_prefill_is_attention_over_past_and_causally_the_chunk(method, choice, kv_type, n_past, n):
    if not sdpa.works(method, torch.device("cuda"), HALF, 128):
        pytest.skip(f"torch's {method} does not work on this card")
    layout = KVLayout(1, 2, 128, kv_type)
    arguments = chunk(layout, n_past, n, heads=10, dtype=HALF, device="cuda")
    out = select_backend(layout, "cuda", choice, method).prefill(*arguments, n_past, 128**-0.5)
    assert error(out, exact_prefill(layout, *arguments, n_past, 128**-0.5)) < 2e-3


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 8, 96), (4, 1, 256), (32, 4, 128)])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_other_shapes_find_a_kernel_that_is_right(heads, kv_heads, dim, dtype):
    layout = KVLayout(1, kv_heads, dim, KVType.K8V4)
    arguments = chunk(layout, 2304, 300, heads=heads, dtype=dtype, device="cuda")
    expected = exact_prefill(layout, *arguments, 2304, dim**-0.5)
    assert error(select_backend(layout, "cuda").prefill(*arguments, 2304, dim**-0.5), expected) < 2e-3


@pytest.mark.parametrize("n_past", [16384 + 2048, 131072])
def test_a_long_past_in_several_pieces(n_past):
    layout = KVLayout(1, 1, 128, KVType.K4V4)
    arguments = chunk(layout, n_past, 1024, heads=2, dtype=HALF, device="cuda")
    expected = exact_prefill(layout, *arguments, n_past, 128**-0.5)
    assert error(select_backend(layout, "cuda").prefill(*arguments, n_past, 128**-0.5), expected) < 2e-3


def test_large_scores_survive():
    """One key per row takes all of the weight; scores reach several hundred."""
    layout = KVLayout(1, 2, 128, KVType.K8V8)
    arguments = chunk(layout, 4096, 512, heads=4, dtype=HALF, device="cuda")
    expected = exact_prefill(layout, *arguments, 4096, 8.0)
    assert error(select_backend(layout, "cuda").prefill(*arguments, 4096, 8.0), expected) < 1e-2


@pytest.mark.parametrize("choice", ["triton", "portable"])
def test_a_missing_causal_mask_is_noticed(monkeypatch, choice):
    layout = KVLayout(1, 2, 128, KVType.K8V4)
    arguments = chunk(layout, 2048, 1024, heads=10, dtype=HALF, device="cuda")
    expected, masked = exact_prefill(layout, *arguments, 2048, 0.1), sdpa.attend
    backend = select_backend(layout, "cuda", choice)
    assert error(backend.prefill(*arguments, 2048, 0.1), expected) < 2e-3
    monkeypatch.setattr(sdpa, "attend", lambda *args, causal: masked(*args, causal=False))
    assert error(backend.prefill(*arguments, 2048, 0.1), expected) > 0.05
