"""The kernels that have no counterpart in the portable backend, and that all of them compile without a card."""

import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.backends import select_backend
from service.engine.exl2_engine.kernels import norm
from service.engine.exl2_engine.portable import PortableBackend
from service.engine.exl2_engine.step import Step
from service.engine.exl2_engine.triton_backend import TritonBackend
from tests.service.engine.exl2_engine.compiling import compiled
from tests.service.engine.exl2_engine.prefill_cases import random

ARCHS = (70, 75, 80, 86, 90)  # 8.9 gets the machine code of 8.6


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.timeout(400)
def test_kernels_compile_for_every_generation(tmp_path):
    for arch, kernels in compiled("compile_codec_kernels.py", ARCHS, tmp_path).items():
        assert len(kernels) == 11, arch
        assert arch >= 80 or all(kernel["stack"] == 0 for kernel in kernels), arch


@pytest.mark.parametrize("kv_type", [KVType.FP16, KVType.K8V4])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (3, 3, 96)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_launch_does_what_rope_rotation_and_append_do(kv_type, heads, kv_heads, dim, dtype):
    layout = KVLayout(1, kv_heads, dim, kv_type)
    whole = random(4, heads + 2 * kv_heads, dim, dtype=dtype)  # as a fused projection gives it
    q, k, v = whole.split((heads, kv_heads, kv_heads), 1)
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, dim, 2) / dim)
    ints = ([5, 0, 131071, 9], [1, 0, 1, 1], [0, 3, -1, 1], [1, 4, 0, 2], [0, 4], [0], [[0]])
    step = Step(*(torch.tensor(x, dtype=torch.int32) for x in ints), max_group_rows=4, max_tokens=0, max_tail=4)
    tails = [torch.full((2, kv_heads, 4, dim), 7.0, dtype=dtype) for _ in range(4)]
    out = TritonBackend(layout).fused_append(q, k, v, step, inv_freq, 1.2, *tails[:2])

    other = PortableBackend(layout, "cpu")
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float16 else {"rtol": 5e-6, "atol": 5e-6}
    torch.testing.assert_close(out, other.rope_and_rotate(q, step.positions, inv_freq, 1.2), **tolerance)
    other.append(step, other.rope_and_rotate(k, step.positions, inv_freq, 1.2), other.rotate(v), *tails[2:])
    torch.testing.assert_close(tails[0], tails[2], **tolerance)
    torch.testing.assert_close(tails[1], tails[3], **tolerance)


@pytest.mark.parametrize("width", [64, 576, 1000])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_is_rms_norm_in_fp32(width, offset):
    x, weight = random(3, width, dtype=torch.float16) * 5, random(width, seed=1, dtype=torch.float16)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)
    out = norm.rmsnorm(x, weight, 1e-5, weight_offset=offset)
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)


def test_norm_with_a_residual_adds_it_first():
    x, residual, weight = (random(*s, seed=i, dtype=torch.float16) for i, s in enumerate([(3, 96), (3, 96), (96,)]))
    total = residual + x
    out = norm.add_rmsnorm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(out, norm.rmsnorm(total, weight, 1e-5))


def test_triton_is_refused_where_it_does_not_reach():
    layout = KVLayout(1, 2, 64, KVType.K8V4)
    assert isinstance(select_backend(layout, "cpu"), PortableBackend)
    with pytest.raises(ValueError, match="need an NVIDIA card"):
        select_backend(layout, "cpu", "triton")
