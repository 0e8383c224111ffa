"""Encodes KV into records and decodes records into KV: the reference every kernel is compared with.

Along the head dim, in groups of 32: the orthonormal Hadamard transform, then integers with one fp16 scale and
no zero point. ``decoded = fp32(code) * fp32(scale)``, rounded once to the output's dtype.

=====  ==============  =====================  =======================================================
bits   codes           scale                  stored as
=====  ==============  =====================  =======================================================
8      -127 .. 127     max |x| / 127          one int8 each
4      -8 .. 7         -(extreme of x) / 8    nibbles ``code + 8``; byte j = value 2j low, 2j + 1 high
16     none            none                   fp16, not transformed
=====  ==============  =====================  =======================================================

The 4-bit scale carries the sign of the value of largest magnitude, which therefore gets code -8: the
sixteenth code is used, and the mean squared error on Gaussian values is 22 % below that of -7 .. 7.
Scales are rounded to fp16 before values are divided by them, so encoding decoded fp32 values again gives
the same bytes (for scales that are normal fp16 numbers). A group whose scale rounds to 0 decodes to
zeros. NaN, infinity and groups beyond fp16's range are refused with ValueError: such KV must never be
persisted.
"""

import sys
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from cache_store.layout import GROUP, KVLayout

_CHUNK_VALUES = 1 << 20  # values decoded at a time, so that scratch memory stays small and in the cache

if sys.byteorder != "little":
    raise ImportError("records are little-endian; this machine is not")


def rotate(x: Tensor) -> Tensor:
    """The orthonormal Hadamard transform over each group of 32 of the last dim; it is its own inverse.

    Computed in fp32, returned in the dtype of `x`. Attention over rotated keys and values takes
    ``rotate(query)`` and gives an output that must be rotated back. For a few rows at a time, a product with
    ``rotate(torch.eye(head_dim))`` is faster.
    """
    return _transformed(x.to(torch.float32)).to(x.dtype)


def encode_record(k: Tensor, v: Tensor, layout: KVLayout, *, rotated: bool = False) -> memoryview:
    """The record of one block of one layer. `k`, `v`: ``[n_kv_heads, n_tokens, head_dim]``.

    `rotated` says that the input already is in the rotated space. Raises ValueError for other shapes and for
    values that cannot be stored.
    """
    if not 0 < k.shape[1] <= layout.block_tokens:
        raise ValueError(f"a block holds 1 to {layout.block_tokens} tokens, not {k.shape[1]}")
    return encode_records(k, v, layout, rotated=rotated)[0]


def encode_records(k: Tensor, v: Tensor, layout: KVLayout, *, rotated: bool = False) -> list[memoryview]:
    """As `encode_record`, for consecutive blocks of one layer, the last of which may be partial."""
    _check_shape("k", k, layout, k.shape[1])
    _check_shape("v", v, layout, k.shape[1])
    records: list[memoryview] = []
    for first, n_blocks, length in _runs(k.shape[1], layout):
        out = torch.empty(n_blocks, layout.record_nbytes(length), dtype=torch.uint8, device=k.device)
        k_codes, k_scales, v_codes, v_scales = _parts(out.view(-1), n_blocks, length, layout)
        k_blocks, v_blocks = (_blocked(x, first, n_blocks, length) for x in (k, v))
        _encode(k_blocks, layout.kv_type.key_bits, k_codes, k_scales, rotated)
        _encode(v_blocks, layout.kv_type.value_bits, v_codes, v_scales, rotated)
        records += [row.numpy().data for row in out.cpu()]
    return records


def decode_records(
    buffer: bytes | bytearray | memoryview | Tensor,
    n_tokens: int,
    layout: KVLayout,
    *,
    out_k: Tensor,
    out_v: Tensor,
    rotated: bool = False,
) -> None:
    """Decode consecutive records of one layer (whole blocks, the last may be partial) into tensors.

    `out_k`, `out_v`: ``[n_kv_heads, >= n_tokens, head_dim]``, fp32, bf16 or fp16, any strides in the
    first two dims. With `rotated` they receive the rotated space, which for 8 and 4 bits skips the
    inverse transform. A `buffer` that cannot be written to is copied first. Raises ValueError when sizes
    or shapes do not fit.
    """
    data = buffer if isinstance(buffer, Tensor) else _as_tensor(buffer)
    expected = sum(layout.record_nbytes(length) for length in layout.block_lengths(n_tokens))
    if data.numel() != expected:
        raise ValueError(f"{n_tokens} tokens take {expected} bytes of records, not {data.numel()}")
    _check_shape("out_k", out_k, layout, n_tokens)
    _check_shape("out_v", out_v, layout, n_tokens)
    at = 0
    for first, n_blocks, length in _chunks(n_tokens, layout):
        size = n_blocks * layout.record_nbytes(length)
        k_codes, k_scales, v_codes, v_scales = _parts(data[at : at + size], n_blocks, length, layout)
        k, v = (_blocked(out, first, n_blocks, length) for out in (out_k, out_v))
        _decode(k_codes, k_scales, layout.kv_type.key_bits, k, rotated)
        _decode(v_codes, v_scales, layout.kv_type.value_bits, v, rotated)
        at += size


def _check_shape(name: str, x: Tensor, layout: KVLayout, n_tokens: int) -> None:
    heads, tokens, dim = x.shape
    if heads != layout.n_kv_heads or dim != layout.head_dim or tokens < n_tokens:
        raise ValueError(f"{name} is {list(x.shape)}, not [{layout.n_kv_heads}, {n_tokens}, {layout.head_dim}]")


def _runs(n_tokens: int, layout: KVLayout) -> list[tuple[int, int, int]]:
    """(first token, number of blocks, tokens per block) of the whole blocks and of the partial one."""
    full, rest = divmod(n_tokens, layout.block_tokens)
    runs = [(0, full, layout.block_tokens)] if full else []
    return runs + ([(full * layout.block_tokens, 1, rest)] if rest else [])


def _chunks(n_tokens: int, layout: KVLayout) -> list[tuple[int, int, int]]:
    """`_runs`, cut so that the scratch of one piece stays in the cache."""
    most = max(1, _CHUNK_VALUES // (layout.n_kv_heads * layout.head_dim * layout.block_tokens))
    return [
        (first + done * length, min(most, n_blocks - done), length)
        for first, n_blocks, length in _runs(n_tokens, layout)
        for done in range(0, n_blocks, most)
    ]


def _parts(data: Tensor, n_blocks: int, length: int, layout: KVLayout) -> Sequence[Tensor]:
    """Views of k_codes, k_scales, v_codes, v_scales as ``[n_blocks, n_kv_heads, length, bytes]`` uint8."""
    rows = data.view(n_blocks, -1)
    parts: list[Tensor] = []
    at = 0
    for nbytes in layout.part_nbytes(length):
        part = rows.narrow(1, at, nbytes)
        parts.append(part.view(n_blocks, layout.n_kv_heads, length, nbytes // (layout.n_kv_heads * length)))
        at += nbytes
    return parts


def _blocked(x: Tensor, first: int, n_blocks: int, length: int) -> Tensor:
    """A view ``[n_blocks, n_kv_heads, length, head_dim]`` of tokens from `first` on."""
    tokens = x.narrow(1, first, n_blocks * length)
    return tokens.view(x.shape[0], n_blocks, length, x.shape[2]).transpose(0, 1)


def _groups(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)


def _as_tensor(buffer: bytes | bytearray | memoryview) -> Tensor:
    view = memoryview(buffer)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


_scratch_of_thread = threading.local()


def _scratch(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized memory that this thread reuses from call to call, until the next use of `name`."""
    pool: dict[tuple[str, torch.device], Tensor] = _scratch_of_thread.__dict__.setdefault("pool", {})
    n = torch.Size(shape).numel()
    held = pool.get((name, device))
    if held is None or held.numel() < n:
        # Made in inference mode it could not be written to outside of it, and callers decode in both.
        with torch.inference_mode(False):
            held = pool[name, device] = torch.empty(n, dtype=dtype, device=device)
    return held[:n].view(*shape)


def _transformed(x: Tensor) -> Tensor:
    """The transform of fp32 values: five rounds, each adding and subtracting the halves of every group and
    interleaving the results. Element by element, so the bits do not depend on shapes, threads or libraries, as those
    of a matrix product do."""
    rows = x.reshape(-1, GROUP)
    buffers = torch.empty_like(rows), _scratch("turned", rows.shape, torch.float32, x.device)
    for i in range(GROUP.bit_length() - 1):
        low, high = rows[:, : GROUP // 2], rows[:, GROUP // 2 :]
        rows = buffers[i % 2]
        pairs = rows.view(-1, GROUP // 2, 2)
        torch.add(low, high, out=pairs[..., 0])
        torch.sub(low, high, out=pairs[..., 1])
    return rows.mul_(GROUP**-0.5).view(x.shape)


def _encode(x: Tensor, bits: int, codes: Tensor, scales: Tensor, rotated: bool) -> None:
    values = x.to(torch.float32)
    if bits == 16:
        stored = (_transformed(values) if rotated else values).to(torch.float16)
        _refuse_unless_finite(stored)
        codes.copy_(stored.contiguous().view(torch.uint8))
        return
    groups = _groups(values if rotated else _transformed(values))
    scale = _scales(groups, bits)
    _refuse_unless_finite(scale)
    scales.copy_(scale.squeeze(-1).view(torch.uint8))
    divisor = scale.to(torch.float32)
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    ints = (groups / divisor).round_().clamp_(low, high).masked_fill_(divisor == 0, 0).to(torch.int8).flatten(-2)
    codes.copy_(ints.view(torch.uint8) if bits == 8 else _packed(ints))


def _scales(groups: Tensor, bits: int) -> Tensor:
    high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    scale = torch.maximum(high, -low) / 127 if bits == 8 else torch.where(high > -low, high, low) / -8
    return scale.to(torch.float16)


def _refuse_unless_finite(x: Tensor) -> None:
    if not torch.isfinite(x).all():
        raise ValueError("KV holds NaN, infinity or values beyond the range of its type")


def _packed(ints: Tensor) -> Tensor:
    nibbles = (ints + 8).view(torch.uint8).view(*ints.shape[:-1], -1, 2)
    return nibbles[..., 0] | nibbles[..., 1] << 4


def _decode(codes: Tensor, scales: Tensor, bits: int, out: Tensor, rotated: bool) -> None:
    if bits == 16:
        values = codes.view(torch.float16)
        out.copy_(rotate(values.to(torch.float32)) if rotated else values)
        return
    ints = codes.view(torch.int8) if bits == 8 else _unpacked(codes)
    direct = rotated and out.dtype == torch.float32
    values = out if direct else _scratch("values", ints.shape, torch.float32, codes.device)
    values.copy_(ints)
    _groups(values).mul_(scales.view(torch.float16).to(torch.float32).unsqueeze(-1))
    if not rotated:
        values = _transformed(values)
    if not direct:
        out.copy_(values)


def _unpacked(codes: Tensor) -> Tensor:
    """Two int8 codes from each byte, in order: widened to 16 bits, a byte has room for both of them."""
    wide = _scratch("wide", codes.shape, torch.int16, codes.device)
    pair = _scratch("pair", codes.shape, torch.int16, codes.device)
    wide.copy_(codes)
    torch.bitwise_left_shift(wide, 4, out=pair)
    pair.bitwise_or_(wide).bitwise_and_(0x0F0F)
    return pair.view(torch.int8).sub_(8)
