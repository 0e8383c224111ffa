"""On the card: records, RoPE, tails and norms of both backends against the codec and FP64."""

import random as python_random

import pytest
import torch

from cache_store.codec import decode_records, encode_records, rotate
from cache_store.layout import BLOCK_TOKENS, KVLayout, KVType
from service.engine.exl2_engine.backends import select_backend
from service.engine.exl2_engine.kernels import norm
from service.engine.exl2_engine.portable_records import record_parts
from service.engine.exl2_engine.step import Step
from tests.service.engine.exl2_engine.prefill_cases import empty_pool, random

pytestmark = pytest.mark.gpu
HALF = torch.float16
SHAPES = [(1, 64), (8, 128), (3, 96), (2, 256), (5, 32)]


def cuda(*shape, seed=0, dtype=HALF):
    return random(*shape, seed=seed, dtype=dtype, device="cuda")


@pytest.fixture(params=["triton", "portable"])
def make(request):
    return lambda layout: select_backend(layout, "cuda", request.param)


def shuffled_blocks(layout, n, n_pool):
    chosen = python_random.Random(n).sample(range(n_pool), layout.n_blocks(n))
    return torch.tensor(chosen, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize(("kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("n", [1, 255, 256, 257, 2048, 2300])
def test_records_are_the_codecs(make, kv_type, kv_heads, dim, n):
    layout = KVLayout(1, kv_heads, dim, kv_type)
    k, v = cuda(n, kv_heads, dim) * 3, cuda(n, kv_heads, dim, seed=1)
    pool, spare = empty_pool(layout, 12, "cuda"), empty_pool(layout, 1, "cuda")[0]
    blocks = shuffled_blocks(layout, n, 12)
    backend = make(layout)
    backend.encode(k, v, pool, blocks)
    rotated = kv_type is not KVType.FP16
    records = encode_records(k.cpu().transpose(0, 1), v.cpu().transpose(0, 1), layout, rotated=rotated)
    for block, record, length in zip(blocks.tolist(), records, layout.block_lengths(n), strict=True):
        used = [part[0, :, :length].flatten() for part in record_parts(pool[block][None], layout)]
        assert torch.equal(torch.cat(used).cpu(), torch.frombuffer(bytearray(record), dtype=torch.uint8))
    for block in set(range(12)) - set(blocks.tolist()):
        assert torch.equal(pool[block], spare)

    out = [torch.full((kv_heads, n + 3, dim), torch.nan, dtype=HALF, device="cuda") for _ in range(2)]
    backend.decode(pool, blocks, n, *out)
    expected = [torch.empty(kv_heads, n, dim, dtype=HALF) for _ in range(2)]
    decode_records(b"".join(records), n, layout, out_k=expected[0], out_v=expected[1], rotated=rotated)
    for mine, theirs in zip(out, expected, strict=True):
        assert torch.equal(mine[:, :n].cpu(), theirs)
        assert mine[:, n:].isnan().all()


@pytest.mark.parametrize("kv_type", [KVType.K8V4, KVType.FP16])
def test_a_long_document_comes_back(make, kv_type):
    layout, n = KVLayout(1, 8, 128, kv_type), 131072
    k, v = cuda(n, 8, 128), cuda(n, 8, 128, seed=1)
    pool, blocks = empty_pool(layout, 600, "cuda"), shuffled_blocks(layout, n, 600)
    backend = make(layout)
    backend.encode(k, v, pool, blocks)
    out_k, out_v = (torch.full((8, n, 128), torch.nan, dtype=HALF, device="cuda") for _ in range(2))
    backend.decode(pool, blocks, n, out_k, out_v)
    for x, out, bits in ((k, out_k, kv_type.key_bits), (v, out_v, kv_type.value_bits)):
        error = (out.transpose(0, 1).float() - x.float()).norm() / x.float().norm()
        assert error <= {16: 0.0, 8: 0.008, 4: 0.12}[bits]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_cannot_be_stored_gets_a_nan_scale(make, bad):
    layout, pool = KVLayout(1, 2, 64, KVType.K8V4), empty_pool(KVLayout(1, 2, 64, KVType.K8V4), 1, "cuda")
    k, v = cuda(3, 2, 64), cuda(3, 2, 64, seed=1)
    k[1, 1, 40], v[2, 0, 3] = bad, bad
    make(layout).encode(k, v, pool, torch.zeros(1, dtype=torch.int32, device="cuda"))
    scales = [x[0, :, :3].contiguous().view(HALF).isnan().nonzero().tolist() for x in record_parts(pool, layout)[1::2]]
    assert scales == [[[1, 1, 1]], [[0, 2, 0]]]


@pytest.mark.parametrize("kv_type", [KVType.K8V4, KVType.FP16])
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (40, 128), (9, 96)])
@pytest.mark.parametrize("rows", [1, 7, 2048])
def test_rope_is_exact_up_to_a_million_tokens(make, kv_type, heads, dim, rows):
    x = cuda(rows, heads, dim)
    positions = torch.randint(0, 1 << 20, (rows,), dtype=torch.int32).cuda()
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, dim, 2, device="cuda") / dim)
    angles = (positions.float()[:, None] * inv_freq).double().repeat(1, 2)[:, None]
    first, second = x.double().chunk(2, -1)
    expected = (x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()) * 1.1
    if kv_type is not KVType.FP16:
        expected = expected @ rotate(torch.eye(dim)).double().cuda()
    out = make(KVLayout(1, heads, dim, kv_type)).rope_and_rotate(x, positions, inv_freq, 1.1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 8, 300])
def test_one_launch_does_what_rope_rotation_and_append_do(rows):
    layout = KVLayout(1, 8, 128, KVType.K8V4)
    triton, portable = (select_backend(layout, "cuda", choice) for choice in ("triton", "portable"))
    q, k, v = cuda(rows, 56, 128).split((40, 8, 8), 1)
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, 128, 2, device="cuda") / 128)
    at = torch.arange(rows) % 50
    at[rows // 2] = -1
    ints = (torch.randint(0, 131072, (rows,)), torch.arange(rows) // 50, at, at + 1, [0, rows], [0], [[0]])
    step = Step(*(torch.as_tensor(x, dtype=torch.int32).cuda() for x in ints), rows, 0, 50)
    tails = [torch.full((7, 8, 50, 128), 7.0, dtype=HALF, device="cuda") for _ in range(6)]
    out = triton.fused_append(q, k, v, step, inv_freq, 1.0, *tails[:2])
    for backend, pair in ((triton, tails[2:4]), (portable, tails[4:])):
        turned = backend.rope_and_rotate(k, step.positions, inv_freq, 1.0), backend.rotate(v)
        backend.append(step, *turned, *pair)
        expected = backend.rope_and_rotate(q, step.positions, inv_freq, 1.0)
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(tails[:2], pair, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("width", [576, 5120, 8192])
@pytest.mark.parametrize("rows", [1, 2048])
def test_norm_is_rms_norm_in_fp32(width, rows):
    x, residual, weight = cuda(rows, width) * 5, cuda(rows, width, seed=1), cuda(width, seed=2)
    total = residual + x
    exact = total.double() / (total.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = norm.add_rmsnorm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)
    assert torch.equal(norm.rmsnorm(total, weight, 1e-5), out)


def test_a_block_far_beyond_two_gigabytes_is_reached(make):
    layout = KVLayout(1, 8, 128, KVType.K8V8)
    n_blocks = (3 << 30) // layout.record_nbytes(BLOCK_TOKENS)
    pool = torch.zeros(n_blocks, layout.record_nbytes(BLOCK_TOKENS), dtype=torch.uint8, device="cuda")
    blocks = torch.tensor([n_blocks - 1], dtype=torch.int32, device="cuda")
    k, v, backend = cuda(256, 8, 128), cuda(256, 8, 128, seed=1), make(layout)
    backend.encode(k, v, pool, blocks)
    assert not pool[:-1].any()
    out_k, out_v = (torch.empty(8, 256, 128, dtype=HALF, device="cuda") for _ in range(2))
    backend.decode(pool, blocks, 256, out_k, out_v)
    torch.testing.assert_close(out_k.transpose(0, 1), k, rtol=0, atol=0.03)
