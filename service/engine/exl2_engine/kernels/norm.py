# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
"""RMS normalization with FP32 arithmetic, with the residual's sum in the same launch where there is one."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_kernel(
    x, residual, weight, out, width, x_stride, residual_stride, eps, weight_offset, ADD: tl.constexpr, W: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, W)
    inside = column < width
    value = tl.load(x + row * x_stride + column, inside, other=0.0)
    if ADD:
        place = residual + row * residual_stride + column
        value = (value.to(tl.float32) + tl.load(place, inside, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(place, value, inside)
    value = value.to(tl.float32)
    mean = tl.sum(value * value, 0) / width
    scale = tl.load(weight + column, inside, other=0.0).to(tl.float32) + weight_offset
    tl.store(out + row * width + column, value * tl.rsqrt(mean + eps) * scale, inside)


def rmsnorm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (weight + weight_offset)`` of rows ``[rows, width]``, in the dtype of `x`."""
    return _launch(x, None, weight, eps, weight_offset)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """Adds `x` to `residual` in place (rounded to its dtype) and gives the sum's `rmsnorm`. Both ``[rows, width]``."""
    return _launch(x, residual, weight, eps, weight_offset)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    other = x if residual is None else residual
    block = triton.next_power_of_2(width)
    if rows:
        _norm_kernel[(rows,)](
            x, other, weight, out, width, x.stride(0), other.stride(0), eps, weight_offset,
            ADD=residual is not None, W=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out
