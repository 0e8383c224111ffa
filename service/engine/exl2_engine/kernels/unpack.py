# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
"""Stored keys and values in registers: codes times scales, as FP16 tiles.

An integer is made an FP16 number without a conversion instruction: its bits are the low mantissa bits of 1024, then
the offset is subtracted. With `FAST` this is PTX that works on four codes at a time and on FP16 in pairs; without,
plain Triton that gives the same numbers (the interpreter knows no PTX).
"""

import triton
import triton.language as tl

# Four int8 codes and their scales. x ^ 0x80 is x + 128 unsigned; 0x64?? is 1024 + that; 0x6480 is 1152.
_INT8 = tl.constexpr(
    """{
    .reg .b32 t, c, m;
    xor.b32 t, $2, 0x80808080;
    mov.b32 m, 0x64646464;
    mov.b32 c, 0x64806480;
    prmt.b32 $0, t, m, 0x4140;
    prmt.b32 $1, t, m, 0x4342;
    sub.rn.f16x2 $0, $0, c;
    sub.rn.f16x2 $1, $1, c;
    mul.rn.f16x2 $0, $0, $3;
    mul.rn.f16x2 $1, $1, $4;
    }"""
)
# Four bytes of two codes: low nibbles as 1024 + n less 1032; high ones as 1024 + 16 n, over 16, less 72. All exact.
_NIBBLES = tl.constexpr(
    """{
    .reg .b32 a, b, c, e, f, m;
    and.b32 a, $4, 0x0F0F0F0F;
    and.b32 b, $4, 0xF0F0F0F0;
    mov.b32 m, 0x64646464;
    mov.b32 c, 0x64086408;
    mov.b32 e, 0x2C002C00;
    mov.b32 f, 0xD480D480;
    prmt.b32 $0, a, m, 0x4140;
    prmt.b32 $1, a, m, 0x4342;
    prmt.b32 $2, b, m, 0x4140;
    prmt.b32 $3, b, m, 0x4342;
    sub.rn.f16x2 $0, $0, c;
    sub.rn.f16x2 $1, $1, c;
    fma.rn.f16x2 $2, $2, e, f;
    fma.rn.f16x2 $3, $3, e, f;
    mul.rn.f16x2 $0, $0, $5;
    mul.rn.f16x2 $1, $1, $6;
    mul.rn.f16x2 $2, $2, $5;
    mul.rn.f16x2 $3, $3, $6;
    }"""
)


# The conversions are not declared pure: the compiler would move them behind the exchange that gives a product its
# operand, which then reads single bytes and converts them in every warp that needs them.


@triton.jit
def from_int8(codes, scales, FAST: tl.constexpr):
    """FP16 of int8 codes and FP16 scales of the same shape."""
    if FAST:
        out = tl.inline_asm_elementwise(_INT8, "=&r,=&r,r,r,r", [codes, scales], tl.float16, is_pure=False, pack=4)
    else:
        out = codes.to(tl.float16) * scales
    return out


@triton.jit
def from_nibbles(codes, scales, FAST: tl.constexpr):
    """FP16 of the low and of the high nibbles of bytes; scales of the same shape."""
    if FAST:
        out = tl.inline_asm_elementwise(
            _NIBBLES, "=&r,=&r,=&r,=&r,r,r,r", [codes, scales], (tl.float16, tl.float16), is_pure=False, pack=4
        )
    else:
        low = ((codes & 15).to(tl.int8) - 8).to(tl.float16)
        high = ((codes >> 4).to(tl.int8) - 8).to(tl.float16)
        out = low * scales, high * scales
    return out


@triton.jit
def _scales(
    base,
    tokens,
    keep,
    N: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """FP16 scales of tokens, each for the `WIDTH` codes of its group, of `COLUMNS` codes a token; 0 where not kept."""
    GROUPS: tl.constexpr = COLUMNS // WIDTH
    groups = tl.arange(0, GROUPS)
    at = base.to(tl.pointer_type(tl.float16)) + tokens[:, None] * (D // 32) + groups[None, :]
    used = (groups < D // 32)[None, :]
    scales = tl.load(at, keep[:, None] & used if MASKED else used, 0.0)
    wide = tl.broadcast_to(tl.expand_dims(scales, 2), (N, GROUPS, WIDTH))
    return tl.reshape(wide, (N, COLUMNS))


@triton.jit
def read_tile(
    codes_at,
    scales_at,
    tokens,
    keep,
    BITS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    MASKED: tl.constexpr,
    FAST: tl.constexpr,
):
    """Keys or values of `tokens`, FP16 ``[N, D_PAD]`` and once more; of 4 bits ``[N, D_PAD // 2]``, those of the even
    and those of the odd dims. Zeros where not kept and beyond `D`: what lies behind a document's end may be anything.
    """
    COLUMNS: tl.constexpr = D_PAD // 2 if BITS == 4 else D_PAD
    USED: tl.constexpr = D // 2 if BITS == 4 else D
    columns = tl.arange(0, COLUMNS)
    at = tokens[:, None] * USED + columns[None, :]
    used = (columns < USED)[None, :]
    if BITS == 16:
        x = tl.load(codes_at.to(tl.pointer_type(tl.float16)) + at, keep[:, None] & used if MASKED else used, 0.0)
        odd = x
    elif BITS == 8:
        codes = tl.load(codes_at.to(tl.pointer_type(tl.int8)) + at, used, 0)
        x = from_int8(codes, _scales(scales_at, tokens, keep, N, D, 32, COLUMNS, MASKED), FAST)
        odd = x
    else:
        codes = tl.load(codes_at + at, used, 0)
        x, odd = from_nibbles(codes, _scales(scales_at, tokens, keep, N, D, 16, COLUMNS, MASKED), FAST)
    return x, odd
