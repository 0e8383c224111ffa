# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
"""RoPE and the codec's transform of queries, keys and values in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from service.engine.exl2_engine.kernels.tiles import hadamard, row_head_dims, tile_rows


@triton.jit
def sine_cosine(angle):
    """Sine and cosine of FP32 angles up to 2^31, to FP32 accuracy: reduced to a quarter turn in FP64.

    Libdevice's own take a branch with a table in local memory from 105,615 on, and that code would be here once for
    every value of a thread. The polynomials are those of Cephes' sinf and cosf.
    """
    exact = angle.to(tl.float64)
    # Beside 1.5 * 2^52 an FP64 number has no room for fractions: the sum is rounded to an integer.
    turns = (exact * 0.6366197723675814 + 6755399441055744.0) - 6755399441055744.0
    rest = (exact - turns * 1.5707963267948966).to(tl.float32)
    square = rest * rest
    sine = rest + rest * square * ((-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1)
    cosine = (
        1.0
        - 0.5 * square
        + square * square * ((2.443315711809948e-5 * square - 1.388731625493765e-3) * square + 4.166664568298827e-2)
    )
    quarter = turns.to(tl.int32)
    odd = (quarter & 1) != 0
    signed_sine = tl.where((quarter & 2) != 0, -1.0, 1.0) * tl.where(odd, cosine, sine)
    return signed_sine, tl.where(((quarter + 1) & 2) != 0, -1.0, 1.0) * tl.where(odd, sine, cosine)


@triton.jit
def roped(x, row, at, dims, valid, positions, inv_freq, scaling, HALF: tl.constexpr):
    """FP32 values after RoPE (rotate-half) of the vectors that start at offsets `at` ``[T, 1]``.

    The angle is rounded to FP32 as transformers rounds it.
    """
    value = tl.load(x + at + dims, valid, other=0.0).to(tl.float32)
    first, turned = dims < HALF, dims < 2 * HALF
    partner_dims = tl.where(first, dims + HALF, dims - HALF)
    partner = tl.load(x + at + partner_dims, valid & turned, other=0.0).to(tl.float32)
    frequency = tl.load(inv_freq + tl.where(first, dims, dims - HALF), turned, other=0.0)
    position = tl.load(positions + row, valid, other=0).to(tl.float32)
    sine, cosine = sine_cosine(position * frequency)
    rotated = value * (cosine * scaling) + partner * tl.where(first, -sine, sine) * scaling
    return tl.where(turned, rotated, value)


@triton.jit
def _rope_kernel(
    x,
    out,
    positions,
    inv_freq,
    scaling,
    n_tiles,
    heads,
    row_stride,
    head_stride,
    HALF: tl.constexpr,
    GROUPS: tl.constexpr,
    TURN: tl.constexpr,
    T: tl.constexpr,
):
    tile = tl.program_id(0) * T + tl.arange(0, T)
    valid = (tile < n_tiles)[:, None]
    row, head, dims = row_head_dims(tile, heads, GROUPS)
    at = row.to(tl.int64) * row_stride + head * head_stride
    if HALF:
        value = roped(x, row, at, dims, valid, positions, inv_freq, scaling, HALF)
    else:
        value = tl.load(x + at + dims, valid, other=0.0).to(tl.float32)
    if TURN:
        value = hadamard(value, HALF == 0 and x.dtype.element_ty == tl.float16)
    tl.store(out + tile.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :], value, valid)


def rope_and_rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float, *, turn: bool) -> Tensor:
    """``[rows, heads, head_dim]`` after RoPE of its first ``2 * len(inv_freq)`` dims and, with `turn`, transformed."""
    return _launch(x, positions, inv_freq, scaling, inv_freq.shape[0], turn)


def rotate(x: Tensor) -> Tensor:
    """The codec's transform of ``[rows, heads, head_dim]``, which is its own inverse."""
    return _launch(x, x, x, 1.0, 0, True)


def _launch(x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float, half: int, turn: bool) -> Tensor:
    x = packed_dims(x)
    rows, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_tiles = rows * heads * dim // 32
    t, warps = tile_rows(n_tiles)
    if n_tiles:
        _rope_kernel[(triton.cdiv(n_tiles, t),)](
            x, out, positions, inv_freq, scaling, n_tiles, heads, x.stride(0), x.stride(1),
            HALF=half, GROUPS=dim // 32, TURN=turn, T=t, num_warps=warps,
        )  # fmt: skip
    return out


def packed_dims(x: Tensor) -> Tensor:
    """`x`, copied if its last dim is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
