# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
"""Blocks of a pool back into keys and values, still transformed: ``fp32(code) * fp32(scale)``, rounded once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_store.layout import KVLayout
from service.engine.exl2_engine.kernels.encode import record_constants

_T = 128


@triton.jit
def _decode_part(
    out, token_stride, tokens, block, head, tile, record, half, n, codes_at, scales_at,
    BITS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Decode `T` tile rows of one block and head; `record` and `half` point to the block's record."""
    token = block * BLOCK + tokens
    valid = (tile < BLOCK * GROUPS) & (token < n)
    columns = tl.arange(0, 32)[None, :]
    row = head * BLOCK * GROUPS + tile
    if BITS == 16:
        value = tl.load(half + codes_at // 2 + row[:, None] * 32 + columns, valid[:, None], other=0.0)
    else:
        scale = tl.load(half + scales_at // 2 + row, valid, other=0.0).to(tl.float32)
        if BITS == 8:
            codes = tl.load(record + codes_at + row[:, None] * 32 + columns, valid[:, None], other=0)
            ints = codes.to(tl.int8, bitcast=True)
        else:
            packed = tl.load(record + codes_at + row[:, None] * 16 + tl.arange(0, 16)[None, :], valid[:, None], other=0)
            ints = tl.reshape(tl.join(packed & 15, packed >> 4), (T, 32)).to(tl.int32) - 8
        value = ints.to(tl.float32) * scale[:, None]
    at = token.to(tl.int64) * token_stride + (tile % GROUPS) * 32
    tl.store(out + at[:, None] + columns, value, valid[:, None])


@triton.jit
def _decode_kernel(
    k, v, pool, pool_half, blocks, n, k_head_stride, k_token_stride, v_head_stride, v_token_stride,
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
        _decode_part(
            k + head.to(tl.int64) * k_head_stride, k_token_stride, tile // GROUPS, block, head, tile, record, half, n,
            0, K_SCALES_AT, K_BITS, GROUPS, BLOCK, T,
        )  # fmt: skip
    else:
        _decode_part(
            v + head.to(tl.int64) * v_head_stride, v_token_stride, tile // GROUPS, block, head, tile, record, half, n,
            V_CODES_AT, V_SCALES_AT, V_BITS, GROUPS, BLOCK, T,
        )  # fmt: skip


def decode_blocks(pool: Tensor, blocks: Tensor, n_tokens: int, k: Tensor, v: Tensor, layout: KVLayout) -> None:
    """As `KVBackend.decode`. Raises ValueError when the last dim of an output is not contiguous."""
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("head dims of the outputs must be contiguous")
    constants, tiles = record_constants(layout, _T)
    if n_tokens:
        grid = (layout.n_blocks(n_tokens) * tiles, layout.n_kv_heads, 2)
        _decode_kernel[grid](
            k, v, pool, pool.view(torch.float16), blocks, n_tokens, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            **constants, T=_T, TILES=tiles, num_warps=4,
        )  # fmt: skip
