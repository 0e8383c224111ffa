"""The codec keeps its promises for every KV type: sizes, error bounds, repeatability, refusals."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cache_store.codec import decode_records, encode_record, encode_records, rotate
from cache_store.layout import GROUP, KVLayout, KVType

BLOCK = 16
QUANTIZED = [KVType.K8V8, KVType.K8V4, KVType.K4V4]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small only lose by a second thread, and lose a lot where other processes want the core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_layout(kv_type: KVType, heads: int = 2, head_dim: int = 64) -> KVLayout:
    return KVLayout(n_layers=1, n_kv_heads=heads, head_dim=head_dim, kv_type=kv_type, block_tokens=BLOCK)


def random_kv(layout: KVLayout, n_tokens: int, seed: int = 0, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, layout.n_kv_heads, n_tokens, layout.head_dim)
    # A few loud channels, as real keys have: the transform is there for them.
    x = torch.randn(shape, generator=generator) * spread
    x[..., 3] *= 12
    return x[0], x[1]


def joined(records: list[memoryview]) -> bytearray:
    return bytearray(b"".join(records))


def decode(
    data: bytearray,
    n_tokens: int,
    layout: KVLayout,
    dtype: torch.dtype = torch.float32,
    rotated: bool = False,
) -> tuple[Tensor, Tensor]:
    k, v = torch.full((2, layout.n_kv_heads, n_tokens + 3, layout.head_dim), 7.0, dtype=dtype)
    decode_records(data, n_tokens, layout, out_k=k, out_v=v, rotated=rotated)
    assert (k[:, n_tokens:] == 7).all(), "wrote past the tokens it was given"
    return k[:, :n_tokens], v[:, :n_tokens]


def groups(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, GROUP))


def error_bound(x: Tensor, bits: int) -> Tensor:
    """The largest error the format allows for each value in the rotated space."""
    peak = groups(rotate(x)).abs().amax(-1, keepdim=True)
    step = peak / (127 if bits == 8 else 8)
    # Half a step; at four bits the end opposite to the extreme value is one code short: a whole step there.
    worst = step * (0.5 if bits == 8 else 1.0) * 1.002
    return worst + 2.0**-25 * 128 + peak * 2.0**-10


@pytest.mark.parametrize("kv_type", QUANTIZED)
@given(n_tokens=st.integers(1, 3 * BLOCK + 5), seed=st.integers(0, 2**31), power=st.integers(-24, 12))
@settings(max_examples=20, deadline=None)
def test_round_trip_stays_inside_the_bound(kv_type: KVType, n_tokens: int, seed: int, power: int) -> None:
    layout = make_layout(kv_type)
    k, v = random_kv(layout, n_tokens, seed, spread=2.0**power)
    decoded = decode(joined(encode_records(k, v, layout)), n_tokens, layout, rotated=True)
    for x, got, bits in zip((k, v), decoded, (kv_type.key_bits, kv_type.value_bits), strict=True):
        error = (groups(rotate(x)) - groups(got)).abs()
        assert (error <= error_bound(x, bits)).all()


def test_fp16_is_exact_and_not_transformed() -> None:
    layout = make_layout(KVType.FP16)
    k, v = (x.half() for x in random_kv(layout, 40))
    records = encode_records(k, v, layout)
    got_k, got_v = decode(joined(records), 40, layout)
    assert torch.equal(got_k, k.float())
    assert torch.equal(got_v, v.float())
    assert bytes(records[0][: k[:, :BLOCK].numel() * 2]) == k[:, :BLOCK].contiguous().numpy().tobytes()


@pytest.mark.parametrize("kv_type", list(KVType))
@given(n_tokens=st.integers(1, 4 * BLOCK), heads=st.integers(1, 4), groups_of_32=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_sizes_are_those_of_the_layout(kv_type: KVType, n_tokens: int, heads: int, groups_of_32: int) -> None:
    layout = make_layout(kv_type, heads, groups_of_32 * GROUP)
    records = encode_records(*random_kv(layout, n_tokens), layout)
    lengths = layout.block_lengths(n_tokens)
    assert [r.nbytes for r in records] == [layout.record_nbytes(n) for n in lengths]


@pytest.mark.parametrize("kv_type", list(KVType))
def test_a_block_alone_gives_the_bytes_it_has_in_a_batch(kv_type: KVType) -> None:
    layout = make_layout(kv_type, heads=3)
    n_tokens = 4 * BLOCK + 7
    k, v = random_kv(layout, n_tokens)
    batch = encode_records(k, v, layout)
    for i, first in enumerate(range(0, n_tokens, BLOCK)):
        last = min(first + BLOCK, n_tokens)
        assert encode_record(k[:, first:last], v[:, first:last], layout) == batch[i]


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_batch_decoding_equals_block_by_block(kv_type: KVType, dtype: torch.dtype) -> None:
    layout = make_layout(kv_type, heads=3)
    n_tokens = 300 * BLOCK + 7  # more than one piece of scratch memory
    records = encode_records(*random_kv(layout, n_tokens), layout)
    for rotated in (False, True):
        k, v = decode(joined(records), n_tokens, layout, dtype, rotated)
        for i, record in itertools.islice(enumerate(records), 0, None, 60):
            first, length = i * BLOCK, min(BLOCK, n_tokens - i * BLOCK)
            one_k, one_v = decode(bytearray(record), length, layout, dtype, rotated)
            assert torch.equal(one_k, k[:, first : first + length])
            assert torch.equal(one_v, v[:, first : first + length])


@pytest.mark.parametrize("kv_type", list(KVType))
def test_rotated_and_plain_decoding_are_the_same_values(kv_type: KVType) -> None:
    layout = make_layout(kv_type)
    data = joined(encode_records(*random_kv(layout, 50), layout))
    for plain, turned in zip(decode(data, 50, layout), decode(data, 50, layout, rotated=True), strict=True):
        torch.testing.assert_close(rotate(plain), turned, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_type", QUANTIZED)
def test_narrow_outputs_are_the_fp32_values_rounded_once(kv_type: KVType) -> None:
    layout = make_layout(kv_type)
    data = joined(encode_records(*random_kv(layout, 50), layout))
    exact = decode(data, 50, layout, torch.float32, rotated=True)
    for dtype in (torch.bfloat16, torch.float16):
        for narrow, wide in zip(decode(data, 50, layout, dtype, rotated=True), exact, strict=True):
            assert torch.equal(narrow, wide.to(dtype))


@pytest.mark.parametrize("kv_type", QUANTIZED)
@given(n_tokens=st.integers(1, 2 * BLOCK), seed=st.integers(0, 2**31), power=st.integers(-6, 10))
@settings(max_examples=20, deadline=None)
def test_encoding_a_decoded_block_again_gives_the_same_bytes(
    kv_type: KVType, n_tokens: int, seed: int, power: int
) -> None:
    layout = make_layout(kv_type)
    first = joined(encode_records(*random_kv(layout, n_tokens, seed, 2.0**power), layout))
    k, v = decode(first, n_tokens, layout, rotated=True)
    assert joined(encode_records(k, v, layout, rotated=True)) == first


@pytest.mark.parametrize("kv_type", QUANTIZED)
def test_encoding_again_through_the_plain_space_gives_the_same_bytes(kv_type: KVType) -> None:
    layout = make_layout(kv_type)
    first = joined(encode_records(*random_kv(layout, 400 * BLOCK), layout))
    assert joined(encode_records(*decode(first, 400 * BLOCK, layout), layout)) == first


@pytest.mark.parametrize("kv_type", list(KVType))
def test_all_zero_groups_decode_to_zero(kv_type: KVType) -> None:
    layout = make_layout(kv_type)
    zeros = torch.zeros(2, 5, 64)
    for got in decode(joined(encode_records(zeros, zeros, layout)), 5, layout):
        assert (got == 0).all()


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3e38, -3e38])
def test_values_that_cannot_be_stored_are_refused(kv_type: KVType, bad: float) -> None:
    layout = make_layout(kv_type)
    k, v = random_kv(layout, 5)
    v[1, 4, 63] = bad
    with pytest.raises(ValueError, match="NaN, infinity"):
        encode_records(k, v, layout)


def test_strided_inputs_and_outputs() -> None:
    layout = make_layout(KVType.K8V4)
    k, v = random_kv(layout, 40)
    scattered_k, scattered_v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    records = encode_records(k, v, layout)
    assert encode_records(scattered_k, scattered_v, layout) == records
    wide = torch.zeros(50, 2, 2, 64, dtype=torch.bfloat16)
    decode_records(joined(records), 40, layout, out_k=wide[:, 0].transpose(0, 1), out_v=wide[:, 1].transpose(0, 1))
    expected = decode(joined(records), 40, layout, torch.bfloat16)
    assert torch.equal(wide[:40, 0].transpose(0, 1), expected[0])
    assert torch.equal(wide[:40, 1].transpose(0, 1), expected[1])


def test_a_read_only_buffer_decodes_too() -> None:
    layout = make_layout(KVType.K4V4)
    data = joined(encode_records(*random_kv(layout, 20), layout))
    k, v = decode(data, 20, layout)
    again_k, again_v = torch.empty_like(k), torch.empty_like(v)
    decode_records(bytes(data), 20, layout, out_k=again_k, out_v=again_v)
    assert torch.equal(k, again_k)
    assert torch.equal(v, again_v)


def test_four_bit_codes_are_where_the_format_says() -> None:
    layout = make_layout(KVType.K4V4, heads=1, head_dim=32)
    turned = torch.arange(-16.0, 16.0).view(1, 1, 32) / 2
    record = encode_record(turned, turned, layout, rotated=True)
    scale = torch.frombuffer(bytearray(record[16:18]), dtype=torch.float16).item()
    assert scale == 1.0
    expected = (turned.flatten().round().clamp(-8, 7) + 8).to(torch.uint8).tolist()
    assert [nibble for byte in record[:16] for nibble in (byte & 15, byte >> 4)] == expected


@pytest.mark.parametrize("n_tokens", [0, BLOCK + 1])
def test_one_record_is_one_block(n_tokens: int) -> None:
    layout = make_layout(KVType.K8V4)
    empty = torch.zeros(2, n_tokens, 64)
    with pytest.raises(ValueError, match="a block holds"):
        encode_record(empty, empty, layout)


def test_wrong_sizes_are_refused() -> None:
    layout = make_layout(KVType.K8V4)
    data = joined(encode_records(*random_kv(layout, 20), layout))
    out = torch.zeros(2, 20, 64)
    with pytest.raises(ValueError, match="bytes of records"):
        decode_records(data[:-1], 20, layout, out_k=out, out_v=out)
    with pytest.raises(ValueError, match="out_v is"):
        decode_records(data, 20, layout, out_k=out, out_v=out[:, :19])
    with pytest.raises(ValueError, match="k is"):
        encode_records(out[:1], out, layout)


def test_the_transform_is_orthonormal_and_its_own_inverse() -> None:
    x = torch.randn(3, 5, 64, dtype=torch.float32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rotate(rotate(x)), x, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(groups(rotate(x)).norm(dim=-1), groups(x).norm(dim=-1), rtol=1e-5, atol=1e-6)
    assert rotate(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("kv_type", list(KVType))
def test_decoding_goes_on_outside_of_inference_mode(kv_type: KVType) -> None:
    # In a thread of its own: working memory from another test must not hide where it was made.
    layout = make_layout(kv_type)

    def both() -> tuple[Tensor, Tensor]:
        k, v = random_kv(layout, BLOCK)
        data = joined(encode_records(k, v, layout))
        with torch.inference_mode():
            inside, _ = decode(data, BLOCK, layout)
        outside, _ = decode(data, BLOCK, layout)
        return inside, outside

    with ThreadPoolExecutor(1) as thread:
        inside, outside = thread.submit(both).result()
    assert torch.equal(inside, outside)


@pytest.mark.parametrize("head_dim", [32, 64])
def test_the_transform_is_the_same_bits_in_every_shape(head_dim: int) -> None:
    x = torch.randn(3, 1000, head_dim, generator=torch.Generator().manual_seed(2))
    whole = rotate(x)
    for n_tokens in (1, 2, 3, 7, 17, 256, 999):
        assert torch.equal(rotate(x[:, :n_tokens]), whole[:, :n_tokens])
        assert torch.equal(rotate(x[:1, :n_tokens].clone()), whole[:1, :n_tokens])


def test_the_transform_is_sylvesters_matrix() -> None:
    matrix = torch.ones(1, 1)
    while len(matrix) < GROUP:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    assert torch.equal(rotate(torch.eye(GROUP)), matrix * GROUP**-0.5)
