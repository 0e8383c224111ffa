# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
"""Attention of few queries over a document's blocks, read as they are stored (split-KV flash decoding).

One program takes one share of a group's document, one KV head and up to `BLOCK_M` of the group's queries for it (rows
times query heads, row-major), so that a document is read once for all sequences on it. It leaves its normalized
output and the base-2 log-sum-exp of its scores for `merge`. Lengths and block tables come from memory: a captured
graph of these launches stays valid when they change.
"""

import triton
import triton.language as tl

from service.engine.exl2_engine.kernels.unpack import read_tile

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _read_queries(q_ptr, vector, row_ok, D: tl.constexpr, D_PAD: tl.constexpr, BITS: tl.constexpr):
    """Queries in the order of dims that `read_tile` gives keys in."""
    dims = tl.arange(0, D_PAD)
    q = tl.load(q_ptr + vector[:, None] * D + dims[None, :], row_ok[:, None] & (dims < D)[None, :], 0.0)
    odd = q
    if BITS == 4:
        q, odd = tl.split(tl.reshape(q, (q.shape[0], D_PAD // 2, 2)))
    return q, odd


@triton.jit
def _weights(s, keep, best, total, scale, bias, HAS_BIAS: tl.constexpr, MASKED: tl.constexpr, SUM: tl.constexpr):
    """Softmax weights FP16 of a tile of scores, the new maximum and sum of every row, and what has been summed up so
    far has to be multiplied with. `SUM` is how weights are summed up: 0 along every row; 1 not across the tokens of a
    tile until the end; 2 by a product with ones, which gives a row's sum 16 times."""
    if HAS_BIAS:
        s = s * scale + bias[None, :]
    if MASKED:
        s = tl.where(keep[None, :], s, float("-inf"))
    if HAS_BIAS:
        new_best = tl.maximum(best, tl.max(s, 1))
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)  # a bias may be -inf
        p = tl.exp2(s - shift[:, None])
    else:
        new_best = tl.maximum(best, tl.max(s, 1) * scale)
        shift = new_best
        p = tl.exp2(s * scale - shift[:, None])
    faded = tl.exp2(best - shift)
    if SUM == 1:
        total = total * faded[:, None] + p
    elif SUM == 2:
        total = tl.dot(p.to(tl.float16), tl.full((p.shape[1], 16), 1.0, tl.float16), total * faded[:, None])
    else:
        total = total * faded + tl.sum(p, 1)
    return p.to(tl.float16), new_best, total, faded


# fmt: off
@triton.jit
def _tile(
    q, q_odd, best, total, acc, acc_odd, record, bias, within, used, scale,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, MASKED: tl.constexpr, SUM: tl.constexpr, FAST: tl.constexpr,
):
    # fmt: on
    """Let the queries see `BLOCK_N` tokens of a block, `within` vectors behind the first of each part of its record.

    Gives the state (maximum, sum, weighted values in one or two halves) after them.
    """
    K_CODES: tl.constexpr = KV_HEADS * 256 * D * K_BITS // 8
    K_ALL: tl.constexpr = K_CODES + (KV_HEADS * 256 * D // 16 if K_BITS < 16 else 0)
    V_CODES: tl.constexpr = K_ALL + KV_HEADS * 256 * D * V_BITS // 8
    tokens = tl.arange(0, BLOCK_N)
    keep = tokens < used
    k_at, k_scales = record + within * (D * K_BITS // 8), record + K_CODES + within * (D // 16)
    k, k_odd = read_tile(k_at, k_scales, tokens, keep, K_BITS, BLOCK_N, D, D_PAD, MASKED, FAST)
    s = tl.dot(q, tl.trans(k))
    if K_BITS == 4:
        s = tl.dot(q_odd, tl.trans(k_odd), s)
    bias = tl.load(bias + within + tokens).to(tl.float32) * LOG2_E if HAS_BIAS else keep
    p, best, total, faded = _weights(s, keep, best, total, scale, bias, HAS_BIAS, MASKED, SUM)
    v_at, v_scales = record + K_ALL + within * (D * V_BITS // 8), record + V_CODES + within * (D // 16)
    v, v_odd = read_tile(v_at, v_scales, tokens, keep, V_BITS, BLOCK_N, D, D_PAD, MASKED, FAST)
    acc = tl.dot(p, v, acc * faded[:, None])
    if V_BITS == 4:
        acc_odd = tl.dot(p, v_odd, acc_odd * faded[:, None])
    return best, total, acc, acc_odd


# fmt: off
@triton.jit
def _store(
    out_at, lse_at, best, total, acc, acc_odd, row_ok,
    D: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr, SUM: tl.constexpr,
):
    # fmt: on
    """Store the normalized values and the log-sum-exp of every row; in two halves, the even dims come first."""
    if SUM == 1:
        total = tl.sum(total, 1)
    elif SUM == 2:
        total = tl.max(total, 1)
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(lse_at, best + tl.log2(total), row_ok)
    columns = tl.arange(0, COLUMNS)
    mask = row_ok[:, None] & (columns < D // HALVES)[None, :]
    tl.store(out_at[:, None] + columns[None, :], acc / total[:, None], mask)
    if HALVES == 2:
        tl.store(out_at[:, None] + D // 2 + columns[None, :], acc_odd / total[:, None], mask)


@triton.jit
def _share(n_tiles):
    """The tiles [first, last) that this program of its split sees."""
    share = tl.cdiv(n_tiles, tl.num_programs(0))
    first = tl.program_id(0) * share
    return first, tl.minimum(first + share, n_tiles)


# fmt: off
@triton.jit
def _slots_of(
    slot_first_ptr, slot_table_ptr, table, group, head, layer, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr,
):
    # fmt: on
    """Where a head's slots lie, see `slots.LayerSlots`: the blocks of all slots, the head's number, its first page."""
    slot_first = tl.load(slot_first_ptr + group)
    blocks = table + slot_first
    of_head = slot_table_ptr + ((tl.load(blocks) * LAYERS + layer) * KV_HEADS + head) * 2
    return blocks, tl.load(of_head, slot_first > 0, 0), tl.load(of_head + 1, slot_first > 0, 0)


# fmt: off
@triton.jit
def _see_document(
    q, q_odd, best, total, acc, acc_odd, pool, bias, table, first, last, n_tokens, head, scale, record_nbytes,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOTS: tl.constexpr, SUM: tl.constexpr,
    PEEL: tl.constexpr, FAST: tl.constexpr,
):
    # fmt: on
    """The state after the tiles [first, last) of the rows that all heads share."""
    # The last tile of a document may be partial: peeled off, no other tile is masked, at the price of registers.
    end = tl.minimum(last, n_tokens // BLOCK_N) if PEEL else last
    if HAS_SLOTS:
        end = tl.where(first < last, end, last)  # a program may have slots and nothing else
    for i in tl.range(first, end, num_stages=STAGES):
        block = tl.load(table + i * BLOCK_N // 256).to(tl.int64)
        best, total, acc, acc_odd = _tile(
            q, q_odd, best, total, acc, acc_odd, pool + block * record_nbytes, bias + block * KV_HEADS * 256,
            head * 256 + i * BLOCK_N % 256, n_tokens - i * BLOCK_N, scale,
            KV_HEADS, D, D_PAD, K_BITS, V_BITS, BLOCK_N, HAS_BIAS, not PEEL, SUM, FAST,
        )  # fmt: skip
    if PEEL and end < last:
        block = tl.load(table + end * BLOCK_N // 256).to(tl.int64)
        best, total, acc, acc_odd = _tile(
            q, q_odd, best, total, acc, acc_odd, pool + block * record_nbytes, bias + block * KV_HEADS * 256,
            head * 256 + end * BLOCK_N % 256, n_tokens - end * BLOCK_N, scale,
            KV_HEADS, D, D_PAD, K_BITS, V_BITS, BLOCK_N, HAS_BIAS, True, SUM, FAST,
        )  # fmt: skip
    return best, total, acc, acc_odd


# fmt: off
@triton.jit
def _see_slots(
    q, q_odd, best, total, acc, acc_odd, pool, bias, blocks, first, last, n_slots, first_page, scale, record_nbytes,
    pool_blocks, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SUM: tl.constexpr,
    FAST: tl.constexpr,
):
    # fmt: on
    """The state after the tiles [first, last) of a head's slots; `pool` is that of all layers."""
    for i in tl.range(first, last, num_stages=STAGES):
        page = first_page + i * BLOCK_N // 256
        block = tl.load(blocks + page // (LAYERS * KV_HEADS))
        place = page % (LAYERS * KV_HEADS)
        record = (place // KV_HEADS).to(tl.int64) * pool_blocks + block
        best, total, acc, acc_odd = _tile(
            q, q_odd, best, total, acc, acc_odd, pool + record * record_nbytes, bias,
            place % KV_HEADS * 256 + i * BLOCK_N % 256, n_slots - i * BLOCK_N, scale,
            KV_HEADS, D, D_PAD, K_BITS, V_BITS, BLOCK_N, False, True, SUM, FAST,
        )  # fmt: skip
    return best, total, acc, acc_odd


# What changes from step to step must not compile another variant: that would also break a graph's capture.
_ANY_VALUE = ["n_rows", "row_tiles", "table_stride", "layer", "pool_blocks"]
_ANY_ADDRESS = ["group_rows_ptr", "group_tokens_ptr", "tables_ptr", "slot_first_ptr"]


# fmt: off
@triton.jit(do_not_specialize=_ANY_VALUE, do_not_specialize_on_alignment=_ANY_ADDRESS)
def document_kernel(
    q_ptr, pool_ptr, bias_ptr, group_rows_ptr, group_tokens_ptr, tables_ptr, out_ptr, lse_ptr,
    slot_first_ptr, slot_table_ptr, slot_pool_ptr, n_rows, row_tiles, scale, record_nbytes, table_stride,
    layer, pool_blocks, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP_HEADS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SLOTS: tl.constexpr, SUM: tl.constexpr, PEEL: tl.constexpr, FAST: tl.constexpr,
):
    # fmt: on
    """Grid ``(splits, KV_HEADS, groups * row_tiles)``. `q_ptr` FP16 ``[n_rows, heads, D]``; `out_ptr` FP32
    ``[splits, n_rows, heads, D]``, for 4-bit values with the even dims first, then the odd; `lse_ptr`
    ``[splits, n_rows, heads]``. A share without tokens writes -inf there and no output. `scale` includes log2(e).
    With `HAS_SLOTS` a program's share of its head's slots follows: see `slots.LayerSlots`."""
    HEADS: tl.constexpr = KV_HEADS * GROUP_HEADS
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
    first, last = _share(tl.cdiv(n_tokens, BLOCK_N))
    table = tables_ptr + group * table_stride
    idle = first >= last
    if HAS_SLOTS:
        slot_blocks, n_slots, first_page = _slots_of(
            slot_first_ptr, slot_table_ptr, table, group, head, layer, LAYERS, KV_HEADS
        )
        slots_from, slots_to = _share(tl.cdiv(n_slots, BLOCK_N))
        idle = idle & (slots_from >= slots_to)
    if idle:
        tl.store(lse_at, tl.full((BLOCK_M,), float("-inf"), tl.float32), row_ok)
        return

    q, q_odd = _read_queries(q_ptr, vector, row_ok, D, D_PAD, K_BITS)
    COLUMNS: tl.constexpr = D_PAD // 2 if V_BITS == 4 else D_PAD
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,) if SUM == 0 else (BLOCK_M, BLOCK_N if SUM == 1 else 16), tl.float32)
    acc = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    best, total, acc, acc_odd = _see_document(
        q, q_odd, best, total, acc, acc, pool_ptr, bias_ptr, table, first, last, n_tokens, head, scale, record_nbytes,
        KV_HEADS, D, D_PAD, K_BITS, V_BITS, BLOCK_N, STAGES, HAS_BIAS, HAS_SLOTS, SUM, PEEL, FAST,
    )  # fmt: skip
    if HAS_SLOTS:
        best, total, acc, acc_odd = _see_slots(
            q, q_odd, best, total, acc, acc_odd, slot_pool_ptr, bias_ptr, slot_blocks, slots_from, slots_to, n_slots,
            first_page, scale, record_nbytes, pool_blocks,
            LAYERS, KV_HEADS, D, D_PAD, K_BITS, V_BITS, BLOCK_N, STAGES, SUM, FAST,
        )  # fmt: skip
    out_at = out_ptr + split.to(tl.int64) * n_rows * HEADS * D + vector * D
    _store(out_at, lse_at, best, total, acc, acc_odd, row_ok, D, COLUMNS, 2 if V_BITS == 4 else 1, SUM)
