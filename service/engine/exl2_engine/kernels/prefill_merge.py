# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
"""Merges attention over disjoint keys by log-sum-exp, and undoes the codec's transform with the last merge."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from service.engine.exl2_engine.kernels.tiles import hadamard
from service.engine.exl2_engine.prefill_attention import Partial

_T = 64


@triton.jit
def _merge_kernel(
    a, a_lse, b, b_lse, out, out_lse, n_tiles, n, group,
    a_head, a_group, a_row, a_lse_head, a_lse_group, a_lse_row,
    b_head, b_group, b_row, b_lse_head, b_lse_group, b_lse_row,
    out_head, out_row,
    BOTH: tl.constexpr, LAST: tl.constexpr, TURN: tl.constexpr, GROUPS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Tile rows in the order (head, row, group of 32); `*_head`, `*_group`, `*_row` are strides."""
    tile = tl.program_id(0) * T + tl.arange(0, T)
    valid = tile < n_tiles
    vector = (tile // GROUPS).to(tl.int64)
    head, row = vector // n, vector % n
    kv_head, member = head // group, head % group
    dims = ((tile % GROUPS) * 32)[:, None] + tl.arange(0, 32)[None, :]
    at = (kv_head * a_head + member * a_group + row * a_row)[:, None] + dims
    value = tl.load(a + at, valid[:, None], other=0.0).to(tl.float32)
    if BOTH:
        lse = tl.load(a_lse + kv_head * a_lse_head + member * a_lse_group + row * a_lse_row, valid, other=0.0)
        other_lse = tl.load(b_lse + kv_head * b_lse_head + member * b_lse_group + row * b_lse_row, valid, other=0.0)
        at = (kv_head * b_head + member * b_group + row * b_row)[:, None] + dims
        other = tl.load(b + at, valid[:, None], other=0.0).to(tl.float32)
        most = tl.maximum(lse, other_lse)
        weight, other_weight = tl.exp(lse - most), tl.exp(other_lse - most)
        total = weight + other_weight
        value = value * (weight / total)[:, None] + other * (other_weight / total)[:, None]
        if not LAST:
            tl.store(out_lse + vector, most + tl.log(total), valid & (tile % GROUPS == 0))
    if TURN:
        value = hadamard(value, False)
    tl.store(out + (head * out_head + row * out_row)[:, None] + dims, value, valid[:, None])


class TritonMerger:
    """A `Merger`. `turn`: whether the space is the codec's, so that the result must be transformed back."""

    def __init__(self, *, turn: bool) -> None:
        self.turn = turn

    def merge(self, a: Partial, b: Partial) -> Partial:
        kv_heads, group, n, dim = a.out.shape
        out = a.out  # what merge() gave before: each program reads and writes its own values
        if out.dtype != torch.float32:
            out = torch.empty(kv_heads, group, n, dim, dtype=torch.float32, device=a.out.device)
        # Not in place: programs that share a row would read what another has written.
        lse = torch.empty(kv_heads, group, n, dtype=torch.float32, device=out.device)
        _launch(a, b, out.flatten(0, 1), lse, last=False, turn=False)
        return Partial(out, lse)

    def finish(self, a: Partial, b: Partial | None, dtype: torch.dtype) -> Tensor:
        kv_heads, group, n, dim = a.out.shape
        out = torch.empty(n, kv_heads * group, dim, dtype=dtype, device=a.out.device)
        _launch(a, b, out.transpose(0, 1), a.lse, last=True, turn=self.turn)
        return out


def _launch(a: Partial, b: Partial | None, out: Tensor, out_lse: Tensor, *, last: bool, turn: bool) -> None:
    """`out` ``[heads, n, head_dim]``."""
    other = b or a
    if out.stride(2) != 1 or a.out.stride(3) != 1 or other.out.stride(3) != 1:
        raise ValueError("head dims must be contiguous")
    kv_heads, group, n, dim = a.out.shape
    n_tiles = kv_heads * group * n * dim // 32
    _merge_kernel[(triton.cdiv(n_tiles, _T),)](
        a.out, a.lse, other.out, other.lse, out, out_lse, n_tiles, n, group,
        *a.out.stride()[:3], *a.lse.stride(), *other.out.stride()[:3], *other.lse.stride(), *out.stride()[:2],
        BOTH=b is not None, LAST=last, TURN=turn, GROUPS=dim // 32, T=_T, num_warps=4,
    )  # fmt: skip
