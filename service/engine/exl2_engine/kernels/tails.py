# pyright: basic
"""Attention of rows over their own tails, in FP16: the part of a sequence that no other sequence shares."""

import triton
import triton.language as tl


@triton.jit
def tail_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    tail_end_ptr,
    group_rows_ptr,
    out_ptr,
    lse_ptr,
    n_rows,
    n_groups,
    first_split,
    scale,
    slot_stride,
    head_stride,
    KV_HEADS: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    EVEN_ODD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
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
    dim_ok = (dims < D)[None, :]
    q = tl.load(q_ptr + vector[:, None] * D + dims[None, :], row_ok[:, None] & dim_ok, 0.0)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    base = slot.to(tl.int64) * slot_stride + head.to(tl.int64) * head_stride
    for at in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        tokens = at + tl.arange(0, BLOCK_N)
        where = base + tokens[:, None] * D + dims[None, :]
        keep = (tokens < last)[:, None] & dim_ok
        k = tl.load(k_ptr + where, keep, 0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where((tokens[None, :] < ends[:, None]) & (tokens < last)[None, :], s, float("-inf"))
        new_best = tl.maximum(best, tl.max(s, 1))
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        p = tl.exp2(s - shift[:, None])
        faded = tl.exp2(best - shift)
        total = total * faded + tl.sum(p, 1)
        best = new_best
        v = tl.load(v_ptr + where, keep, 0.0)
        acc = tl.dot(p.to(tl.float16), v, acc * faded[:, None])

    tl.store(lse_at, best + tl.log2(tl.where(total == 0.0, 1.0, total)), row_ok)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if EVEN_ODD:
        dims = dims % 2 * (D // 2) + dims // 2
    out_at = out_ptr + place.to(tl.int64) * n_rows * HEADS * D + vector[:, None] * D + dims[None, :]
    tl.store(out_at, out, row_ok[:, None] & dim_ok)
