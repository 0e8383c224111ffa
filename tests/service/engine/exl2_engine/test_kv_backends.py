"""Both backends against the codec and FP64: the portable one, and the Triton kernels in Triton's interpreter."""

import math

import pytest
import torch

from cache_store.codec import decode_records, encode_records, rotate
from cache_store.layout import BLOCK_TOKENS, KVLayout, KVType
from service.engine.exl2_engine import prefill_attention, sdpa
from service.engine.exl2_engine.portable import PortableBackend
from service.engine.exl2_engine.step import Step
from tests.service.engine.exl2_engine.prefill_cases import chunk, empty_pool, exact_prefill, random

TYPES = list(KVType)
HALF = torch.float16


@pytest.fixture(params=["portable", "triton"])
def make(request):
    def make(layout):
        if request.param == "portable":
            return PortableBackend(layout, "cpu")
        from service.engine.exl2_engine.triton_backend import TritonBackend

        return TritonBackend(layout)

    return make


def layout_of(kv_type, kv_heads=2, head_dim=64):
    return KVLayout(1, kv_heads, head_dim, kv_type)


def stored(k, v, layout):
    """The codec's records of transformed values ``[n, kv_heads, d]``; FP16 KV is stored as it comes."""
    rotated = layout.kv_type is not KVType.FP16
    return encode_records(k.transpose(0, 1), v.transpose(0, 1), layout, rotated=rotated)


def part_bytes(record, n, layout):
    """The used bytes of each part of a full record whose first `n` tokens are in use."""
    at = 0
    for nbytes in layout.part_nbytes(BLOCK_TOKENS):
        yield record[at : at + nbytes].view(layout.n_kv_heads, BLOCK_TOKENS, -1)[:, :n].flatten()
        at += nbytes


@pytest.mark.parametrize("kv_type", TYPES)
@pytest.mark.parametrize(("n", "head_dim", "dtype"), [(1, 96, torch.float32), (257, 64, HALF)])
def test_encoding_gives_the_codecs_bytes(make, kv_type, n, head_dim, dtype):
    layout = layout_of(kv_type, head_dim=head_dim)
    k, v = random(n, 2, head_dim, dtype=dtype) * 3, random(n, 2, head_dim, seed=1, dtype=dtype)
    v[0, 0, :32] = torch.tensor([1.0, -1.0] * 16)  # ties for the extreme value and, at 4 bits, for its sign
    k[0, 1, :32] = torch.arange(32) * 1e-6  # a subnormal scale
    pool = empty_pool(layout, 4)
    blocks = torch.tensor([2, 0], dtype=torch.int32)[: layout.n_blocks(n)]
    make(layout).encode(k, v, pool, blocks)
    for block, record, length in zip(blocks, stored(k, v, layout), layout.block_lengths(n), strict=True):
        expected = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        assert torch.equal(torch.cat(list(part_bytes(pool[block], length, layout))), expected)
    untouched = empty_pool(layout, 1)[0]
    assert torch.equal(pool[1], untouched)
    assert torch.equal(pool[3], untouched)


@pytest.mark.parametrize("kv_type", [KVType.K8V4, KVType.K4V4])
def test_groups_of_zeros_come_back_as_zeros(make, kv_type):
    layout, pool, blocks = layout_of(kv_type), empty_pool(layout_of(kv_type), 1), torch.zeros(1, dtype=torch.int32)
    k, v = torch.zeros(1, 2, 64), -torch.zeros(1, 2, 64)
    backend = make(layout)
    backend.encode(k, v, pool, blocks)
    out_k, out_v = torch.ones(2, 1, 64), torch.ones(2, 1, 64)
    backend.decode(pool, blocks, 1, out_k, out_v)
    assert not out_k.any()
    assert not out_v.any()


@pytest.mark.parametrize("kv_type", [KVType.K8V4, KVType.K4V4])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 6e7])
def test_what_cannot_be_stored_gets_a_nan_scale(make, kv_type, bad):
    layout = layout_of(kv_type)
    k, v = random(3, 2, 64), random(3, 2, 64, seed=1)
    k[1, 1, 40] = bad
    v[2, 0, 3] = bad
    pool = empty_pool(layout, 1)
    make(layout).encode(k, v, pool, torch.tensor([0], dtype=torch.int32))
    _, k_scales, _, v_scales = (x.view(2, 3, -1) for x in part_bytes(pool[0], 3, layout))
    k_nan, v_nan = (x.contiguous().view(HALF).isnan() for x in (k_scales, v_scales))
    assert k_nan.nonzero().tolist() == [[1, 1, 1]]
    assert v_nan.nonzero().tolist() == [[0, 2, 0]]


@pytest.mark.parametrize("kv_type", TYPES)
@pytest.mark.parametrize(("n", "dtype"), [(1, torch.float32), (257, HALF)])
def test_decoding_gives_the_codecs_values(make, kv_type, n, dtype):
    layout = layout_of(kv_type, kv_heads=1, head_dim=96)
    pool = empty_pool(layout, 3)
    backend = make(layout)
    blocks = torch.tensor([2, 1], dtype=torch.int32)[: layout.n_blocks(n)]
    k, v = random(n, 1, 96), random(n, 1, 96, seed=1)
    backend.encode(k, v, pool, blocks)
    out_k, out_v = (torch.full((1, n + 5, 96), math.nan, dtype=dtype) for _ in range(2))
    backend.decode(pool, blocks, n, out_k, out_v)
    expected_k, expected_v = torch.empty(1, n, 96, dtype=dtype), torch.empty(1, n, 96, dtype=dtype)
    data = b"".join(stored(k, v, layout))
    rotated = kv_type is not KVType.FP16
    decode_records(data, n, layout, out_k=expected_k, out_v=expected_v, rotated=rotated)
    assert torch.equal(out_k[:, :n], expected_k)
    assert torch.equal(out_v[:, :n], expected_v)
    assert out_k[:, n:].isnan().all()


def exact_rope(x, positions, inv_freq, scaling):
    """RoPE in FP64 of the FP32 angles, as transformers makes them."""
    angles = (positions.float()[:, None] * inv_freq).double().repeat(1, 2)[:, None]
    first, second = x.double().chunk(2, -1)
    return (x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()) * scaling


@pytest.mark.parametrize("kv_type", [KVType.FP16, KVType.K8V8])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_rope_is_exact_up_to_a_million_tokens(make, kv_type, head_dim, dtype):
    backend = make(layout_of(kv_type, head_dim=head_dim))
    x = random(5, 3, head_dim, dtype=dtype)
    positions = torch.tensor([0, 1, 131071, 999_999, 1_048_575], dtype=torch.int32)
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, head_dim, 2) / head_dim)
    expected = exact_rope(x, positions, inv_freq, 1.1)
    if kv_type is not KVType.FP16:
        expected = rotate(expected.float()).double()
    out = backend.rope_and_rotate(x, positions, inv_freq, 1.1)
    assert out.dtype == dtype
    tolerance = 2e-3 if dtype == HALF else 2e-6
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_rope_of_a_part_of_the_head_leaves_the_rest(make):
    backend = make(layout_of(KVType.FP16))
    x, positions = random(2, 3, 64), torch.tensor([7, 70], dtype=torch.int32)
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, 32, 2) / 32)
    out = backend.rope_and_rotate(x, positions, inv_freq, 1.0)
    assert torch.equal(out[..., 32:], x[..., 32:])
    torch.testing.assert_close(out[..., :32].double(), exact_rope(x[..., :32], positions, inv_freq, 1.0))


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_rotation_is_the_codecs_and_its_own_inverse(make, dtype):
    backend, x = make(layout_of(KVType.K8V4, head_dim=96)), random(7, 5, 96, dtype=dtype)
    once = backend.rotate(x)
    torch.testing.assert_close(once, rotate(x), rtol=1e-3, atol=2e-6 if dtype == torch.float32 else 1e-3)
    torch.testing.assert_close(backend.rotate(once), x, rtol=2e-3, atol=5e-6 if dtype == torch.float32 else 3e-3)
    assert torch.equal(make(layout_of(KVType.FP16)).rotate(x), x)


def step_of(positions, slots, tail_at):
    n = len(slots)
    ints = [torch.tensor(x, dtype=torch.int32) for x in (positions, slots, tail_at, [0] * n, [0, n], [0], [[0]])]
    return Step(*ints, max_group_rows=n, max_tokens=0, max_tail=0)


@pytest.mark.parametrize("tail_at", [[3, 0, -1, 6], [-1, -1, -1, -1], [-1, -1, 0, -1]])
def test_append_writes_the_rows_that_have_a_place_and_nothing_else(make, tail_at):
    slots = [2, 0, 0, 2]
    k, v = random(4, 2, 64), random(4, 2, 64, seed=1)
    tails = [torch.full((3, 2, 8, 64), 7.0, dtype=HALF) for _ in range(4)]
    make(layout_of(KVType.K8V4)).append(step_of([0] * 4, slots, tail_at), k, v, *tails[:2])
    for row, (slot, at) in enumerate(zip(slots, tail_at, strict=True)):
        if at >= 0:
            tails[2][slot, :, at], tails[3][slot, :, at] = k[row], v[row]
    assert torch.equal(tails[0], tails[2])
    assert torch.equal(tails[1], tails[3])


@pytest.mark.parametrize("kv_type", TYPES)
@pytest.mark.parametrize(("n_past", "n"), [(0, 1), (0, 70), (256, 33), (1280, 40)])
def test_prefill_is_attention_over_the_decoded_past_and_causally_the_chunk(make, monkeypatch, kv_type, n_past, n):
    monkeypatch.setattr(prefill_attention, "PIECE_TOKENS", 512)
    monkeypatch.setattr(prefill_attention, "_LEAST_PIECE", 256)
    layout = layout_of(kv_type)
    arguments = chunk(layout, n_past, n, heads=6)
    out = make(layout).prefill(*arguments, n_past, 0.2)
    assert out.shape == (n, 6, 64)
    torch.testing.assert_close(out.double(), exact_prefill(layout, *arguments, n_past, 0.2), rtol=1e-4, atol=2e-5)


def test_prefill_repeats_itself_in_and_out_of_inference_mode(make):
    layout = layout_of(KVType.K8V4)
    backend, arguments = make(layout), chunk(layout, 512, 5, heads=4)
    with torch.inference_mode():
        first = backend.prefill(*arguments, 512, 0.2)
    assert torch.equal(backend.prefill(*arguments, 512, 0.2), first)


def test_the_comparison_notices_a_missing_causal_mask(make, monkeypatch):
    layout = layout_of(KVType.K8V4)
    arguments = chunk(layout, 256, 40, heads=4)
    expected, lse = exact_prefill(layout, *arguments, 256, 0.2), torch.zeros(1)
    assert sdpa.agrees(make(layout).prefill(*arguments, 256, 0.2), lse, expected, lse)
    masked = sdpa.attend
    monkeypatch.setattr(sdpa, "attend", lambda *args, causal: masked(*args, causal=False))
    assert not sdpa.agrees(make(layout).prefill(*arguments, 256, 0.2), lse, expected, lse)


def test_warming_up_attends_to_every_length_of_a_piece(make, monkeypatch):
    monkeypatch.setattr(prefill_attention, "PIECE_TOKENS", 1024)
    monkeypatch.setattr(prefill_attention, "_LEAST_PIECE", 256)
    lengths, attend = [], sdpa.attend

    def noted(method, q, k, *rest, causal):
        lengths.append((q.shape[1], k.shape[1], causal))
        return attend(method, q, k, *rest, causal=causal)

    monkeypatch.setattr(sdpa, "attend", noted)
    make(layout_of(KVType.K4V4)).prefill_attention.warm_up(4, 16, "cpu", torch.float32)
    assert lengths == [(16, 16, True), (32, 1024, False), (32, 512, False), (32, 256, False)]


def test_pieces_cover_the_past_in_few_lengths():
    lengths = set()
    for n_past in range(0, 70 * 2048, 2048):
        pieces = list(prefill_attention._pieces(n_past))
        assert sum(n for _, n in pieces) == n_past
        assert [first for first, _ in pieces] == [sum(n for _, n in pieces[:i]) for i in range(len(pieces))]
        lengths |= {n for _, n in pieces}
    assert lengths == {2048, 4096, 8192, 16384}
    assert list(prefill_attention._pieces(2048 + 768)) == [(0, 2048), (2048, 768)]
