"""On the card: the parts of a replay in FP16 against FP64, with every kernel of torch that this card has."""

import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine import sdpa
from service.engine.exl2_engine.backends import select_backend
from service.engine.exl2_engine.replay import largest
from service.engine.exl2_engine.sdpa import Method
from tests.service.engine.exl2_engine.replay_cases import exact_over, rows_over, wide_keys

pytestmark = pytest.mark.gpu
HALF = torch.float16


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("choice", ["triton", "portable"])
@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize(("n", "lengths"), [(32, [300]), (1000, [2304]), (700, [2300, 2048])])
def test_probabilities_of_decoded_keys(method, choice, kv_type, n, lengths):
    if not sdpa.works(method, torch.device("cuda"), HALF, 128):
        pytest.skip(f"torch's {method} does not work on this card")
    layout = KVLayout(1, 2, 128, kv_type)
    case = rows_over(layout, n, 10, lengths, HALF, "cuda")
    scale = 128**-0.5
    out, lse = select_backend(layout, "cuda", choice, method).prefill_attention.over(*case, scale)
    expected, expected_lse, most = exact_over(layout, case, scale)
    assert float((out.double() - expected).norm() / expected.norm()) < 2e-3
    assert float((lse.double() - expected_lse).abs().max()) < 2e-3
    q, _, _, before = case
    found = (largest(q, lse / scale, wide_keys(before[0][0])) * scale).exp()
    torch.testing.assert_close(found.double(), most, rtol=5e-3, atol=1e-6)


def test_scores_of_several_hundred_keep_their_probabilities():
    layout = KVLayout(1, 2, 128, KVType.K8V8)
    case = rows_over(layout, 300, 4, [900], HALF, "cuda")
    out, lse = select_backend(layout, "cuda").prefill_attention.over(*case, 8.0)
    _, _, most = exact_over(layout, case, 8.0)
    q, _, _, before = case
    found = (largest(q, lse / 8.0, wide_keys(before[0][0])) * 8.0).clamp(max=0).exp()
    assert torch.isfinite(out).all()
    torch.testing.assert_close(found.double(), most, rtol=0.3, atol=1e-3)
