# pyright: basic
"""Attention of few queries over a document's blocks, read as they are stored (split-KV flash decoding).

One program takes one share of a group's document, one KV head and up to `BLOCK_M` of the group's queries for it (rows
times query heads, row-major), so that a document is read once for all sequences on it. It leaves its normalized
output and the base-2 log-sum-exp of its scores for `merge`. Lengths and block tables come from memory: a captured
graph of these launches stays valid when they change.
"""

import triton
import triton.language as tl

from service.engine.exl2_engine.kernels.unpack import from_int8, from_nibbles, spread

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scale_tile(base, tokens, keep, N: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """FP16 scales of tokens, `GROUPS` a token of which ``D // 32`` exist, spread over `WIDTH` codes each; 0 where not
    kept, so that what lies behind a document's end counts as zeros."""
    groups = tl.arange(0, GROUPS)
    mask = keep[:, None] & (groups < D // 32)[None, :]
    scales = tl.load(base.to(tl.pointer_type(tl.float16)) + tokens[:, None] * (D // 32) + groups[None, :], mask, 0.0)
    return spread(scales, N, GROUPS, WIDTH)


@triton.jit
def document_kernel(
    q_ptr,
    pool_ptr,
    bias_ptr,
    group_rows_ptr,
    group_tokens_ptr,
    tables_ptr,
    out_ptr,
    lse_ptr,
    n_rows,
    row_tiles,
    scale,
    record_nbytes,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Grid ``(splits, KV_HEADS, groups * row_tiles)``. `q_ptr` FP16 ``[n_rows, heads, D]``; `out_ptr` FP32
    ``[splits, n_rows, heads, D]``, for 4-bit values with the even dims first, then the odd; `lse_ptr`
    ``[splits, n_rows, heads]``. A share without tokens writes -inf there and no output. `scale` includes log2(e)."""
    HEADS: tl.constexpr = KV_HEADS * GROUP_HEADS
    K_ROW: tl.constexpr = D * K_BITS // 8
    V_ROW: tl.constexpr = D * V_BITS // 8
    S_ROW: tl.constexpr = D // 16
    K_CODES: tl.constexpr = KV_HEADS * 256 * K_ROW
    K_ALL: tl.constexpr = K_CODES + (KV_HEADS * 256 * S_ROW if K_BITS < 16 else 0)
    V_CODES: tl.constexpr = KV_HEADS * 256 * V_ROW
    GROUPS: tl.constexpr = D_PAD // 32
    HALF: tl.constexpr = D_PAD // 2

    split, head = tl.program_id(0), tl.program_id(1)
    group, tile = tl.program_id(2) // row_tiles, tl.program_id(2) % row_tiles
    first_row = tl.load(group_rows_ptr + group)
    queries = (tl.load(group_rows_ptr + group + 1) - first_row) * GROUP_HEADS
    if tile * BLOCK_M >= queries:
        return
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = at < queries
    vector = (first_row + at // GROUP_HEADS) * HEADS + head * GROUP_HEADS + at % GROUP_HEADS
    lse_at = lse_ptr + split * n_rows * HEADS + vector

    n_tokens = tl.load(group_tokens_ptr + group)
    n_tiles = tl.cdiv(n_tokens, BLOCK_N)
    share = tl.cdiv(n_tiles, tl.num_programs(0))
    first = split * share
    last = tl.minimum(first + share, n_tiles)
    if first >= last:
        tl.store(lse_at, tl.full((BLOCK_M,), float("-inf"), tl.float32), row_ok)
        return

    dims, halves = tl.arange(0, D_PAD), tl.arange(0, HALF)
    if K_BITS == 4:
        even_at = q_ptr + vector[:, None] * D + 2 * halves[None, :]
        q_mask = row_ok[:, None] & (halves < D // 2)[None, :]
        q = tl.load(even_at, q_mask, 0.0)
        q_odd = tl.load(even_at + 1, q_mask, 0.0)
    else:
        q = tl.load(q_ptr + vector[:, None] * D + dims[None, :], row_ok[:, None] & (dims < D)[None, :], 0.0)

    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if V_BITS == 4:
        acc = tl.zeros((BLOCK_M, HALF), tl.float32)
        acc_odd = tl.zeros((BLOCK_M, HALF), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    tokens = tl.arange(0, BLOCK_N)
    for i in tl.range(first, last, num_stages=STAGES):
        block = tl.load(tables_ptr + group * table_stride + i * BLOCK_N // 256).to(tl.int64)
        within = head * 256 + i * BLOCK_N % 256
        record = pool_ptr + block * record_nbytes
        keep = i * BLOCK_N + tokens < n_tokens
        keys = record + within * K_ROW
        if K_BITS == 4:
            k_scales = _scale_tile(record + K_CODES + within * S_ROW, tokens, keep, BLOCK_N, D, GROUPS, 16)
            codes = tl.load(keys + tokens[:, None] * K_ROW + halves[None, :], (halves < K_ROW)[None, :], 0)
            k, k_odd = from_nibbles(codes, k_scales, FAST)
            s = tl.dot(q, tl.trans(k))
            s = tl.dot(q_odd, tl.trans(k_odd), s)
        elif K_BITS == 8:
            k_scales = _scale_tile(record + K_CODES + within * S_ROW, tokens, keep, BLOCK_N, D, GROUPS, 32)
            at_k = keys.to(tl.pointer_type(tl.int8)) + tokens[:, None] * K_ROW + dims[None, :]
            s = tl.dot(q, tl.trans(from_int8(tl.load(at_k, (dims < D)[None, :], 0), k_scales, FAST)))
        else:
            at_k = keys.to(tl.pointer_type(tl.float16)) + tokens[:, None] * D + dims[None, :]
            s = tl.dot(q, tl.trans(tl.load(at_k, keep[:, None] & (dims < D)[None, :], 0.0)))
        s *= scale
        if HAS_BIAS:
            bias_at = bias_ptr + (block * KV_HEADS * 256 + within) + tokens
            s += (tl.load(bias_at, keep, 0.0).to(tl.float32) * LOG2_E)[None, :]
        s = tl.where(keep[None, :], s, float("-inf"))

        new_best = tl.maximum(best, tl.max(s, 1))
        shift = new_best
        if HAS_BIAS:  # all scores may be -inf
            shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        p = tl.exp2(s - shift[:, None])
        faded = tl.exp2(best - shift)
        total = total * faded + tl.sum(p, 1)
        best = new_best
        p = p.to(tl.float16)

        values = record + K_ALL + within * V_ROW
        if V_BITS == 4:
            v_scales = _scale_tile(record + K_ALL + V_CODES + within * S_ROW, tokens, keep, BLOCK_N, D, GROUPS, 16)
            codes = tl.load(values + tokens[:, None] * V_ROW + halves[None, :], (halves < V_ROW)[None, :], 0)
            v, v_odd = from_nibbles(codes, v_scales, FAST)
            acc = tl.dot(p, v, acc * faded[:, None])
            acc_odd = tl.dot(p, v_odd, acc_odd * faded[:, None])
        elif V_BITS == 8:
            v_scales = _scale_tile(record + K_ALL + V_CODES + within * S_ROW, tokens, keep, BLOCK_N, D, GROUPS, 32)
            at_v = values.to(tl.pointer_type(tl.int8)) + tokens[:, None] * V_ROW + dims[None, :]
            v = from_int8(tl.load(at_v, (dims < D)[None, :], 0), v_scales, FAST)
            acc = tl.dot(p, v, acc * faded[:, None])
        else:
            at_v = values.to(tl.pointer_type(tl.float16)) + tokens[:, None] * D + dims[None, :]
            v = tl.load(at_v, keep[:, None] & (dims < D)[None, :], 0.0)
            acc = tl.dot(p, v, acc * faded[:, None])

    tl.store(lse_at, best + tl.log2(tl.where(total == 0.0, 1.0, total)), row_ok)
    one_over = 1.0 / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = out_ptr + split.to(tl.int64) * n_rows * HEADS * D + vector[:, None] * D
    if V_BITS == 4:
        out_mask = row_ok[:, None] & (halves < D // 2)[None, :]
        tl.store(out_at + halves[None, :], acc * one_over, out_mask)
        tl.store(out_at + D // 2 + halves[None, :], acc_odd * one_over, out_mask)
    else:
        tl.store(out_at + dims[None, :], acc * one_over, row_ok[:, None] & (dims < D)[None, :])
