# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
"""Few rows times a matrix of 4-bit weights, read as exllamav2 keeps them: ``y = x @ w``.

Three launches: `arrange_kernel` puts the inputs in the order in which weights lie in words (and normalizes the rows
before, where wanted), `product_kernel` multiplies shares of the inputs with tiles of the outputs, `finish_kernel` or
`gate_kernel` adds the shares up, always in the same order. Up to three matrices with the same inputs are one launch.

Inputs are taken 128 at a time: 16 words of a column. Input ``8 r + j`` of the 128 is weight j of word r and stands at
``16 j + r`` of the arranged inputs, so that one weight of 16 words is the operand of one tensor core instruction.
"""

import triton
import triton.language as tl

from service.engine.exl2_engine.kernels.nibbles import codes_of

_ROWS = ["rows"]  # what differs from step to step must not compile another variant


# fmt: off
@triton.jit(do_not_specialize=_ROWS)
def arrange_kernel(
    x, weight, tables, out, rows, width, padded, x_stride, eps,
    NORM: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """Grid ``(rows, tables, ceil(padded / BLOCK))``. `x` FP16 ``[rows, width]``; `tables` int32 ``[tables, padded]``:
    the input at each place, -1 for none; `out` FP16 ``[tables, rows, padded]``. With `NORM` what is put there is the
    row's RMS norm times `weight` ``[width]``; `W` is the power of two that holds a row."""
    row, table = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = place < padded
    source = tl.load(tables + table * padded + place, inside, -1)
    used = source >= 0
    value = tl.load(x + row * x_stride + source, used, 0.0)
    if NORM:
        column = tl.arange(0, W)
        whole = tl.load(x + row * x_stride + column, column < width, 0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(whole * whole, 0) / width + eps)
        value = (value.to(tl.float32) * factor * tl.load(weight + source, used, 0.0).to(tl.float32)).to(tl.float16)
    tl.store(out + (table * rows + row) * padded + place, value, inside)


@triton.jit
def _exl2_scale(words, shift, top):
    """FP16 scales, rounded as exllamav2 rounds them: the square of a 4-bit number and one, times the group's."""
    root = ((words >> shift) & 15) + 1
    return (root * root).to(tl.float16) * top


# fmt: off
@triton.jit
def _scales(
    scales, tops, groups, n, keep, width, GPTQ: tl.constexpr,
):
    # fmt: on
    """FP16 scales and zeros of outputs `n` in `groups`, both ``[G, N]``. EXL2 has no zeros: then they are of no use."""
    at = groups[:, None] * (width // 8) + (n // 8)[None, :]
    shift = ((n & 7) * 4)[None, :]
    if GPTQ:
        scale = tl.load(scales.to(tl.pointer_type(tl.float16)) + groups[:, None] * width + n[None, :], keep, 0.0)
        zero = (((tl.load(tops.to(tl.pointer_type(tl.int32)) + at, keep, 0) >> shift) & 15) + 1).to(tl.float16)
    else:
        words = tl.load(scales.to(tl.pointer_type(tl.int32)) + at, keep, 0)
        scale = _exl2_scale(words, shift, tl.load(tops.to(tl.pointer_type(tl.float16)) + groups)[:, None])
        zero = scale
    return scale, zero


# fmt: off
@triton.jit
def _group_scales(
    scales, tops, group, n, keep, width, GPTQ: tl.constexpr,
):
    # fmt: on
    """As `_scales` for one group: ``[N]``."""
    at = group * (width // 8) + n // 8
    shift = (n & 7) * 4
    if GPTQ:
        scale = tl.load(scales.to(tl.pointer_type(tl.float16)) + group * width + n, keep, 0.0)
        zero = (((tl.load(tops.to(tl.pointer_type(tl.int32)) + at, keep, 0) >> shift) & 15) + 1).to(tl.float16)
    else:
        words = tl.load(scales.to(tl.pointer_type(tl.int32)) + at, keep, 0)
        scale = _exl2_scale(words, shift, tl.load(tops.to(tl.pointer_type(tl.float16)) + group))
        zero = scale
    return scale, zero


@triton.jit
def _dots(at, row_ok, w0, w1, w2, w3, w4, w5, w6, w7):
    """FP32 ``[BLOCK_M, BLOCK_N]``: 128 arranged inputs times their weights."""
    y = tl.dot(tl.load(at, row_ok, 0.0), w0)
    y = tl.dot(tl.load(at + 16, row_ok, 0.0), w1, y)
    y = tl.dot(tl.load(at + 32, row_ok, 0.0), w2, y)
    y = tl.dot(tl.load(at + 48, row_ok, 0.0), w3, y)
    y = tl.dot(tl.load(at + 64, row_ok, 0.0), w4, y)
    y = tl.dot(tl.load(at + 80, row_ok, 0.0), w5, y)
    y = tl.dot(tl.load(at + 96, row_ok, 0.0), w6, y)
    return tl.dot(tl.load(at + 112, row_ok, 0.0), w7, y)


# fmt: off
@triton.jit
def _block(
    acc, x_at, row_ok, words_at, scales, tops, block, n, n_ok, n_in, width,
    GROUP: tl.constexpr, GPTQ: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr,
):
    # fmt: on
    """Add 128 inputs' share to `acc`. Groups of at least 128 inputs scale the sum, smaller ones the weights."""
    r = tl.arange(0, 16)
    inside = n_ok[None, :] & ((block * 16 + r) * 8 < n_in)[:, None]
    words = tl.load(words_at) if EVEN else tl.load(words_at, inside, 0)
    if GROUP >= 128:
        scale, zero = _group_scales(scales, tops, block * 128 // GROUP, n, n_ok, width, GPTQ)
        zeros = tl.broadcast_to(zero[None, :], words.shape)
        w0, w1, w2, w3, w4, w5, w6, w7 = codes_of(words, zeros, not GPTQ, FAST)
        acc += _dots(x_at, row_ok, w0, w1, w2, w3, w4, w5, w6, w7) * scale.to(tl.float32)[None, :]
    else:
        inputs = tl.minimum(block * 128 + r * 8, n_in - 8)
        s, zeros = _scales(scales, tops, inputs // GROUP, n, n_ok[None, :], width, GPTQ)
        w0, w1, w2, w3, w4, w5, w6, w7 = codes_of(words, zeros, not GPTQ, FAST)
        acc += _dots(x_at, row_ok, w0 * s, w1 * s, w2 * s, w3 * s, w4 * s, w5 * s, w6 * s, w7 * s)
    return acc


# fmt: off
@triton.jit(do_not_specialize=_ROWS)
def product_kernel(
    x, words_0, words_1, words_2, scales_0, scales_1, scales_2, tops_0, tops_1, tops_2, part,
    rows, n_in, padded, n_0, n_1, n_2, table_1, table_2,
    MATRICES: tl.constexpr, GROUP: tl.constexpr, GPTQ: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr,
):
    # fmt: on
    """Grid ``(tiles of all matrices, shares)``. `x` FP16 ``[tables, rows, padded]`` arranged inputs, `table_1`,
    `table_2`: which of them the second and third matrix take. Of each matrix: `words` int32 ``[n_in / 8, n]``, EXL2's
    `scales` int32 ``[groups, n / 8]`` and `tops` FP16 ``[groups]``, or GPTQ's `scales` FP16 ``[groups, n]`` and `tops`
    int32 ``[groups, n / 8]`` (zeros less one). `part` FP32 ``[shares, rows, n_0 + n_1 + n_2]``.
    `EVEN`: `n_in` is a multiple of 128 and every n one of `BLOCK_N`. `rows` up to `BLOCK_M`."""
    tile, share = tl.program_id(0), tl.program_id(1)
    words, scales, tops, width, before = words_0, scales_0, tops_0, n_0, 0
    if MATRICES > 1:
        tiles = tl.cdiv(n_0, BLOCK_N)
        if tile >= tiles:
            tile -= tiles
            words, scales, tops, width, before = words_1, scales_1, tops_1, n_1, n_0
            x += table_1 * rows * padded
            if MATRICES > 2:
                tiles = tl.cdiv(n_1, BLOCK_N)
                if tile >= tiles:
                    tile -= tiles
                    words, scales, tops, width, before = words_2, scales_2, tops_2, n_2, n_0 + n_1
                    x += (table_2 - table_1) * rows * padded
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m, r = tl.arange(0, BLOCK_M), tl.arange(0, 16)
    n_ok, row_ok = n < width, (m < rows)[:, None]
    blocks = padded // 128
    length = tl.cdiv(blocks, tl.num_programs(1))
    first = share * length
    x_at = x + m[:, None] * padded + r[None, :]
    words_at = words + r[:, None] * width + n[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in tl.range(first, tl.minimum(first + length, blocks), num_stages=STAGES):
        acc = _block(
            acc, x_at + i * 128, row_ok, words_at + i * 16 * width, scales, tops, i, n, n_ok, n_in, width,
            GROUP, GPTQ, EVEN, FAST,
        )  # fmt: skip
    total = n_0 + n_1 + n_2
    tl.store(part + (share * rows + m)[:, None] * total + before + n[None, :], acc, row_ok & n_ok[None, :])


@triton.jit
def _sum(part, rows, row, column, ok, total, SHARES: tl.constexpr):
    """All shares of some columns of a row, FP32."""
    value = tl.load(part + row * total + column, ok, 0.0)
    for share in tl.static_range(1, SHARES):
        value += tl.load(part + (share * rows + row) * total + column, ok, 0.0)
    return value


@triton.jit
def _to_fp16(x):
    """Within FP16's range: exllamav2's norms take the infinite as the largest number, ours do not."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


# fmt: off
@triton.jit(do_not_specialize=_ROWS)
def finish_kernel(
    part, bias, residual, out, rows, n_0, n_1, n_2, SHARES: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # fmt: on
    """Grid ``(rows, ceil(n / BLOCK))``: shares to FP16 ``[rows, n_0]``, ``[rows, n_1]``, ``[rows, n_2]``, one behind
    the other in `out`. `bias` FP16 ``[n]``; with `ADD` `residual` ``[rows, n_0]`` is added, which may be `out`."""
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = n_0 + n_1 + n_2
    ok = column < total
    value = _sum(part, rows, row, column, ok, total, SHARES)
    if BIAS:
        value += tl.load(bias + column, ok, 0.0).to(tl.float32)
    at = row * n_0 + column
    at = tl.where(column >= n_0, rows * n_0 + row * n_1 + column - n_0, at)
    at = tl.where(column >= n_0 + n_1, rows * (n_0 + n_1) + row * n_2 + column - n_0 - n_1, at)
    if ADD:
        value += tl.load(residual + at, ok, 0.0).to(tl.float32)
    tl.store(out + at, _to_fp16(value), ok)


# fmt: off
@triton.jit(do_not_specialize=_ROWS)
def gate_kernel(
    part, bias, table, out, rows, n, padded, SHARES: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """Grid ``(rows, ceil(padded / BLOCK))``: ``silu(gate) * up`` of shares of both (`n` outputs each), within FP16's
    range, at the places that `table` gives them among the next matrix's inputs: `out` FP16 ``[rows, padded]``."""
    row, place = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < padded
    column = tl.load(table + place, inside, -1)
    ok = column >= 0
    gate = _sum(part, rows, row, column, ok, 2 * n, SHARES)
    up = _sum(part, rows, row, column + n, ok, 2 * n, SHARES)
    if BIAS:
        gate += tl.load(bias + column, ok, 0.0).to(tl.float32)
        up += tl.load(bias + n + column, ok, 0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * padded + place, _to_fp16(value), inside)
