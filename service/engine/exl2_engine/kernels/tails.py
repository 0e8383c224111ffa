# pyright: basic
"""Attention of rows over their own tails, in FP16: the part of a sequence that no other sequence shares."""

import triton
import triton.language as tl

_ANY_VALUE = ["n_rows", "n_groups", "first_split"]
_ANY_ADDRESS = ["slots_ptr", "tail_end_ptr", "group_rows_ptr"]


@triton.jit
def _masked_weights(s, seen, best, total, scale):
    """As `decode._weights`, for rows of which each sees other keys, perhaps none."""
    s = tl.where(seen, s * scale, float("-inf"))
    new_best = tl.maximum(best, tl.max(s, 1))
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    p = tl.exp2(s - shift[:, None])
    faded = tl.exp2(best - shift)
    return p.to(tl.float16), new_best, total * faded + tl.sum(p, 1), faded


# fmt: off
@triton.jit(do_not_specialize=_ANY_VALUE, do_not_specialize_on_alignment=_ANY_ADDRESS)
def tail_kernel(
    q_ptr, k_ptr, v_ptr, slots_ptr, tail_end_ptr, group_rows_ptr, out_ptr, lse_ptr,
    n_rows, n_groups, first_split, scale, slot_stride, head_stride,
    KV_HEADS: tl.constexpr, GROUP_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    EVEN_ODD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """Grid ``(splits, KV_HEADS, n_rows)``. A run of rows with one slot, side by side, is done by the program of its
    first row (runs are cut at multiples of the rows that a tile holds); programs of other rows have nothing to do.

    `k_ptr`, `v_ptr`: FP16 ``[slots, KV_HEADS, tokens, D]``. Writes splits `first_split` and up of the partial results
    that `document_kernel` describes, with the dims in its order for 4-bit values where `EVEN_ODD`.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP_HEADS
    ROWS: tl.constexpr = BLOCK_M // GROUP_HEADS
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    used_rows = tl.load(group_rows_ptr + n_groups)
    if row >= used_rows:
        return
    slot = tl.load(slots_ptr + row)
    if tl.load(slots_ptr + row - 1, row % ROWS != 0, -1) == slot:
        return
    rows = row + tl.arange(0, BLOCK_M) // GROUP_HEADS
    row_ok = rows < tl.minimum((row // ROWS + 1) * ROWS, used_rows)
    row_ok = row_ok & (tl.load(slots_ptr + rows, row_ok, -1) == slot)
    ends = tl.load(tail_end_ptr + rows, row_ok, 0)
    vector = rows * HEADS + head * GROUP_HEADS + tl.arange(0, BLOCK_M) % GROUP_HEADS
    place = first_split + split
    lse_at = lse_ptr + place * n_rows * HEADS + vector

    end = tl.max(ends, 0)
    share = tl.cdiv(tl.cdiv(end, tl.num_programs(0)), BLOCK_N) * BLOCK_N
    first = split * share
    last = tl.minimum(first + share, end)
    if first >= last:
        tl.store(lse_at, tl.full((BLOCK_M,), float("-inf"), tl.float32), row_ok)
        return

    dims = tl.arange(0, D_PAD)
    mask = row_ok[:, None] & (dims < D)[None, :]
    q = tl.load(q_ptr + vector[:, None] * D + dims[None, :], mask, 0.0)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    base = slot.to(tl.int64) * slot_stride + head.to(tl.int64) * head_stride
    for at in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        tokens = at + tl.arange(0, BLOCK_N)
        where = base + tokens[:, None] * D + dims[None, :]
        keep = (tokens < last)[:, None] & (dims < D)[None, :]
        s = tl.dot(q, tl.trans(tl.load(k_ptr + where, keep, 0.0)))
        seen = tokens[None, :] < tl.minimum(ends, last)[:, None]
        p, best, total, faded = _masked_weights(s, seen, best, total, scale)
        acc = tl.dot(p, tl.load(v_ptr + where, keep, 0.0), acc * faded[:, None])

    total = tl.where(total == 0.0, 1.0, total)
    tl.store(lse_at, best + tl.log2(total), row_ok)
    order = dims % 2 * (D // 2) + dims // 2 if EVEN_ODD else dims
    out_at = out_ptr + place.to(tl.int64) * n_rows * HEADS * D + vector[:, None] * D + order[None, :]
    tl.store(out_at, acc / total[:, None], mask)
