# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
"""Quantize-on-write: transformed keys and values into blocks of a pool, bit for bit as `cache_store.codec` encodes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_store.layout import BLOCK_TOKENS, KVLayout

_T = 128


@triton.jit
def _scales(x, BITS: tl.constexpr):
    """FP16 scales ``[T]`` of FP32 groups ``[T, 32]``, NaN where a value is not finite or the scale is beyond FP16."""
    finite = tl.abs(x) < float("inf")
    known = tl.where(finite, x, 0.0)
    if BITS == 8:
        most = tl.max(tl.abs(known), 1)
        scale = tl.div_rn(most, tl.full(most.shape, 127.0, tl.float32))
    else:
        high, low = tl.max(known, 1), tl.min(known, 1)
        scale = tl.where(high > -low, high, low) * -0.125
    fits = (tl.abs(scale) < 65520.0) & (tl.min(finite.to(tl.int32), 1) > 0)
    return tl.where(fits, tl.where(fits, scale, 0.0).to(tl.float16), float("nan"))


@triton.jit
def _codes(x, scale, BITS: tl.constexpr):
    """Integers of FP32 groups, rounded half to even."""
    divisor = scale.to(tl.float32)
    usable = (tl.abs(divisor) < float("inf")) & (divisor != 0)
    divided = tl.div_rn(tl.where(usable[:, None], x, 0.0), tl.where(usable, divisor, 1.0)[:, None] + tl.zeros_like(x))
    low: tl.constexpr = -127.0 if BITS == 8 else -8.0
    high: tl.constexpr = 127.0 if BITS == 8 else 7.0
    bounded = tl.minimum(tl.maximum(divided, low), high)
    # Beside 1.5 * 2^23 an FP32 number has no room for fractions: the sum is rounded as the codec rounds.
    return ((bounded + 12582912.0) - 12582912.0).to(tl.int32)


@triton.jit
def _encode_part(
    x, token_stride, tokens, block, head, tile, record, scale_record, n, codes_at, scales_at,
    BITS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Encode `T` tile rows of one block and head; `record` and `scale_record` point to the block's record."""
    token = block * BLOCK + tokens
    valid = (tile < BLOCK * GROUPS) & (token < n)
    columns = tl.arange(0, 32)[None, :]
    at = token.to(tl.int64) * token_stride + (tile % GROUPS) * 32
    value = tl.load(x + at[:, None] + columns, valid[:, None], other=0.0)
    row = head * BLOCK * GROUPS + tile
    if BITS == 16:
        where = codes_at // 2 + row[:, None] * 32 + columns
        tl.store(scale_record + where, value.to(tl.float16), valid[:, None])
    else:
        value = value.to(tl.float32)
        scale = _scales(value, BITS)
        ints = _codes(value, scale, BITS)
        tl.store(scale_record + scales_at // 2 + row, scale, valid)
        if BITS == 8:
            where = codes_at + row[:, None] * 32 + columns
            tl.store(record + where, (ints & 255).to(tl.uint8), valid[:, None])
        else:
            even, odd = tl.split(tl.reshape(ints + 8, (T, 16, 2)))
            where = codes_at + row[:, None] * 16 + tl.arange(0, 16)[None, :]
            tl.store(record + where, (even | (odd << 4)).to(tl.uint8), valid[:, None])


@triton.jit
def _encode_kernel(
    k, v, pool, pool_half, blocks, n, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_SCALES_AT: tl.constexpr, V_CODES_AT: tl.constexpr,
    V_SCALES_AT: tl.constexpr, RECORD: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Axis 0: blocks times tiles of a head; axis 1: heads; axis 2: keys, values."""
    block, head = tl.program_id(0) // TILES, tl.program_id(1)
    tile = tl.program_id(0) % TILES * T + tl.arange(0, T)
    stored = tl.load(blocks + block).to(tl.int64)
    record, half = pool + stored * RECORD, pool_half + stored * (RECORD // 2)
    if tl.program_id(2) == 0:
        _encode_part(
            k + head * k_head_stride, k_token_stride, tile // GROUPS, block, head, tile, record, half, n,
            0, K_SCALES_AT, K_BITS, GROUPS, BLOCK, T,
        )  # fmt: skip
    else:
        _encode_part(
            v + head * v_head_stride, v_token_stride, tile // GROUPS, block, head, tile, record, half, n,
            V_CODES_AT, V_SCALES_AT, V_BITS, GROUPS, BLOCK, T,
        )  # fmt: skip


def encode(k: Tensor, v: Tensor, pool: Tensor, blocks: Tensor, layout: KVLayout) -> None:
    """As `KVBackend.encode`."""
    n, heads, _ = k.shape
    if k.stride(2) != 1 or v.stride(2) != 1:
        k, v = k.contiguous(), v.contiguous()
    constants, tiles = record_constants(layout, _T)
    if n:
        grid = (layout.n_blocks(n) * tiles, heads, 2)
        _encode_kernel[grid](
            k, v, pool, pool.view(torch.float16), blocks, n, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            **constants, T=_T, TILES=tiles, num_warps=4,
        )  # fmt: skip


def record_constants(layout: KVLayout, tile: int) -> tuple[dict[str, int], int]:
    """A record's geometry as kernel constants, and the tiles of `tile` groups in one head of a block."""
    k_codes, k_scales, v_codes, v_scales = layout.part_nbytes(BLOCK_TOKENS)
    groups = layout.head_dim // 32
    constants = {
        "K_BITS": layout.kv_type.key_bits,
        "V_BITS": layout.kv_type.value_bits,
        "K_SCALES_AT": k_codes,
        "V_CODES_AT": k_codes + k_scales,
        "V_SCALES_AT": k_codes + k_scales + v_codes,
        "RECORD": k_codes + k_scales + v_codes + v_scales,
        "GROUPS": groups,
        "BLOCK": BLOCK_TOKENS,
    }
    return constants, -(-BLOCK_TOKENS * groups // tile)
