# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
"""Writes rows' keys and values behind their tails; at decode together with RoPE and the transform, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from service.engine.exl2_engine.kernels.rope import packed_dims, roped
from service.engine.exl2_engine.kernels.tiles import hadamard, row_head_dims, tile_rows
from service.engine.exl2_engine.step import Step


@triton.jit
def _store(tail, value, row, head, dims, valid, slots, tail_at, slot_stride, head_stride, HEAD_DIM: tl.constexpr):
    slot = tl.load(slots + row, valid, other=0).to(tl.int64)
    token = tl.load(tail_at + row, valid, other=-1)
    where = slot * slot_stride + head * head_stride + token * HEAD_DIM + dims
    tl.store(tail + where, value, valid & (token >= 0))


@triton.jit
def _append_kernel(
    k,
    v,
    tail_k,
    tail_v,
    slots,
    tail_at,
    n_tiles,
    heads,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    slot_stride,
    tail_head_stride,
    GROUPS: tl.constexpr,
    T: tl.constexpr,
):
    tile = tl.program_id(0) * T + tl.arange(0, T)
    valid = (tile < n_tiles)[:, None]
    row, head, dims = row_head_dims(tile, heads, GROUPS)
    if tl.program_id(1) == 0:
        value = tl.load(k + row.to(tl.int64) * k_row_stride + head * k_head_stride + dims, valid, other=0.0)
        _store(tail_k, value, row, head, dims, valid, slots, tail_at, slot_stride, tail_head_stride, GROUPS * 32)
    else:
        value = tl.load(v + row.to(tl.int64) * v_row_stride + head * v_head_stride + dims, valid, other=0.0)
        _store(tail_v, value, row, head, dims, valid, slots, tail_at, slot_stride, tail_head_stride, GROUPS * 32)


def append(step: Step, k: Tensor, v: Tensor, tail_k: Tensor, tail_v: Tensor) -> None:
    """Write transformed keys and values ``[R, n_kv_heads, head_dim]``; rows with a negative `tail_at` write nothing."""
    k, v = packed_dims(k), packed_dims(v)
    _check_tails(tail_k, tail_v)
    rows, heads, dim = k.shape
    n_tiles = rows * heads * dim // 32
    t, warps = tile_rows(n_tiles)
    if n_tiles:
        _append_kernel[(triton.cdiv(n_tiles, t), 2)](
            k, v, tail_k, tail_v, step.slots, step.tail_at, n_tiles, heads,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1), tail_k.stride(0), tail_k.stride(1),
            GROUPS=dim // 32, T=t, num_warps=warps,
        )  # fmt: skip


@triton.jit
def _fused_kernel(
    q,
    k,
    v,
    out,
    tail_k,
    tail_v,
    positions,
    slots,
    tail_at,
    inv_freq,
    scaling,
    rows,
    heads,
    kv_heads,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    slot_stride,
    tail_head_stride,
    HALF: tl.constexpr,
    GROUPS: tl.constexpr,
    TURN: tl.constexpr,
    T: tl.constexpr,
):
    """Programs of axis 0: the queries' tiles; then the keys' and the values'."""
    q_programs = tl.cdiv(rows * heads * GROUPS, T)
    kv_programs = tl.cdiv(rows * kv_heads * GROUPS, T)
    program = tl.program_id(0)
    if program < q_programs:
        tile = program * T + tl.arange(0, T)
        valid = (tile < rows * heads * GROUPS)[:, None]
        row, head, dims = row_head_dims(tile, heads, GROUPS)
        at = row.to(tl.int64) * q_row_stride + head * q_head_stride
        value = roped(q, row, at, dims, valid, positions, inv_freq, scaling, HALF)
        if TURN:
            value = hadamard(value, False)
        tl.store(out + tile.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :], value, valid)
    elif program < q_programs + kv_programs:
        tile = (program - q_programs) * T + tl.arange(0, T)
        valid = (tile < rows * kv_heads * GROUPS)[:, None]
        row, head, dims = row_head_dims(tile, kv_heads, GROUPS)
        at = row.to(tl.int64) * k_row_stride + head * k_head_stride
        value = roped(k, row, at, dims, valid, positions, inv_freq, scaling, HALF)
        if TURN:
            value = hadamard(value, False)
        _store(tail_k, value, row, head, dims, valid, slots, tail_at, slot_stride, tail_head_stride, GROUPS * 32)
    else:
        tile = (program - q_programs - kv_programs) * T + tl.arange(0, T)
        valid = (tile < rows * kv_heads * GROUPS)[:, None]
        row, head, dims = row_head_dims(tile, kv_heads, GROUPS)
        at = row.to(tl.int64) * v_row_stride + head * v_head_stride
        value = tl.load(v + at + dims, valid, other=0.0).to(tl.float32)
        if TURN:
            value = hadamard(value, v.dtype.element_ty == tl.float16)
        _store(tail_v, value, row, head, dims, valid, slots, tail_at, slot_stride, tail_head_stride, GROUPS * 32)


def fused_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Step,
    inv_freq: Tensor,
    scaling: float,
    tail_k: Tensor,
    tail_v: Tensor,
    *,
    turn: bool,
) -> Tensor:
    """RoPE (and with `turn` the transform) of queries and keys, the transform of values, and `append`, in one launch.

    `q` ``[R, n_heads, head_dim]``, `k` and `v` ``[R, n_kv_heads, head_dim]`` as projected. Gives the queries.
    """
    q, k, v = packed_dims(q), packed_dims(k), packed_dims(v)
    _check_tails(tail_k, tail_v)
    rows, heads, dim = q.shape
    kv_heads, groups = k.shape[1], dim // 32
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    t, warps = tile_rows(rows * heads * groups)
    programs = triton.cdiv(rows * heads * groups, t) + 2 * triton.cdiv(rows * kv_heads * groups, t)
    if programs:
        _fused_kernel[(programs,)](
            q, k, v, out, tail_k, tail_v, step.positions, step.slots, step.tail_at, inv_freq, scaling,
            rows, heads, kv_heads, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            tail_k.stride(0), tail_k.stride(1),
            HALF=inv_freq.shape[0], GROUPS=groups, TURN=turn, T=t, num_warps=warps,
        )  # fmt: skip
    return out


def _check_tails(tail_k: Tensor, tail_v: Tensor) -> None:
    if tail_k.stride() != tail_v.stride() or tail_k.stride(3) != 1 or tail_k.stride(2) != tail_k.shape[3]:
        raise ValueError("tails of keys and values must have the same strides, tokens next to each other")
