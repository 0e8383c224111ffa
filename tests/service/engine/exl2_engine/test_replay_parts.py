"""The parts of a replay with the kernels in Triton's interpreter and without them, against FP64."""

import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.portable import PortableBackend
from service.engine.exl2_engine.replay import largest
from tests.service.engine.exl2_engine.replay_cases import exact_over, rows_over, wide_keys


@pytest.fixture(params=["portable", "triton"])
def make_backend(request):
    if request.param == "portable":
        return lambda layout: PortableBackend(layout, "cpu")
    from service.engine.exl2_engine.triton_backend import TritonBackend

    return TritonBackend


@pytest.mark.parametrize("kv_type", [KVType.FP16, KVType.K8V4])
@pytest.mark.parametrize("lengths", [[70], [70, 33], [40, 20, 9]])
def test_rows_attend_to_all_that_is_decoded_and_causally_to_themselves(make_backend, kv_type, lengths):
    layout = KVLayout(1, 2, 64, kv_type)
    case = rows_over(layout, 37, 6, lengths, torch.float32)
    out, lse = make_backend(layout).prefill_attention.over(*case, 0.125)
    expected, expected_lse, most = exact_over(layout, case, 0.125)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)
    q, _, _, before = case
    found = (largest(q, lse / 0.125, wide_keys(before[0][0])) * 0.125).exp()
    torch.testing.assert_close(found.double(), most, rtol=1e-4, atol=1e-7)
