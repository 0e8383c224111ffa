# pyright: basic
"""Combines partial attention results by their log-sum-exp and undoes the codec's transform."""

import triton
import triton.language as tl


@triton.jit
def _hadamard_signs():
    """``[1, 32, 32]``: -1 where the indices share an odd number of set bits."""
    both = tl.arange(0, 32)[:, None] & tl.arange(0, 32)[None, :]
    both ^= both >> 4
    both ^= both >> 2
    both ^= both >> 1
    return tl.expand_dims(1.0 - 2.0 * (both & 1).to(tl.float32), 0)


# fmt: off
@triton.jit(do_not_specialize=["n_rows", "n_groups", "n_splits"], do_not_specialize_on_alignment=["group_rows_ptr"])
def merge_kernel(
    part_ptr, lse_ptr, group_rows_ptr, out_ptr, n_rows, n_groups, n_splits,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    EVEN_ODD: tl.constexpr, ROTATED: tl.constexpr, BLOCK_S: tl.constexpr,
):
    # fmt: on
    """Grid ``(HEADS, n_rows)``: one vector of `out_ptr`, FP16 ``[n_rows, HEADS, D]``, from `n_splits` parts of it.

    A part whose log-sum-exp is -inf was not written and is not read. Rows behind the last group's, and rows that saw
    no key, become zeros.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    vector = row * HEADS + head
    dims = tl.arange(0, D_PAD)
    at = dims % 2 * (D // 2) + dims // 2 if EVEN_ODD else dims
    used = row < tl.load(group_rows_ptr + n_groups)
    best = float("-inf")
    total = 0.0
    acc = tl.zeros((D_PAD,), tl.float32)
    for first in range(0, n_splits, BLOCK_S):
        splits = first + tl.arange(0, BLOCK_S)
        lse = tl.load(lse_ptr + splits * n_rows * HEADS + vector, used & (splits < n_splits), float("-inf"))
        seen = lse != float("-inf")
        place = splits.to(tl.int64)[:, None] * n_rows * HEADS * D + vector * D + at[None, :]
        part = tl.load(part_ptr + place, seen[:, None] & (dims < D)[None, :], 0.0)
        new_best = tl.maximum(best, tl.max(lse, 0))
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(lse - shift)
        faded = tl.exp2(best - shift)
        acc = acc * faded + tl.sum(weights[:, None] * part, 0)
        total = total * faded + tl.sum(weights, 0)
        best = new_best
    acc = acc / tl.where(total == 0.0, 1.0, total)
    if ROTATED:
        x = tl.reshape(acc, (D_PAD // 32, 1, 32))
        acc = tl.reshape(tl.sum(x * _hadamard_signs(), 2), (D_PAD,)) * 0.17677669529663687
    tl.store(out_ptr + vector * D + dims, acc.to(tl.float16), dims < D)
