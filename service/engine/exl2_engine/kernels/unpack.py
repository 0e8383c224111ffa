# pyright: basic
"""Quantized keys and values in registers: codes times scales, as FP16 tiles.

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


@triton.jit
def spread(scales, N: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Scales ``[N, GROUPS]`` as ``[N, GROUPS * WIDTH]``: each for the `WIDTH` codes of its group."""
    wide = tl.broadcast_to(tl.expand_dims(scales, 2), (N, GROUPS, WIDTH))
    return tl.reshape(wide, (N, GROUPS * WIDTH))


@triton.jit
def from_int8(codes, scales, FAST: tl.constexpr):
    """FP16 of int8 codes and FP16 scales of the same shape."""
    if FAST:
        return tl.inline_asm_elementwise(_INT8, "=r,=r,r,r,r", [codes, scales], dtype=tl.float16, is_pure=True, pack=4)
    return codes.to(tl.float16) * scales


@triton.jit
def from_nibbles(codes, scales, FAST: tl.constexpr):
    """FP16 of the low and of the high nibbles of bytes; scales ``[..]`` of the same shape."""
    if FAST:
        return tl.inline_asm_elementwise(
            _NIBBLES,
            "=r,=r,=r,=r,r,r,r",
            [codes, scales],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    low = (codes & 15).to(tl.int8) - 8
    high = (codes >> 4).to(tl.int8) - 8
    return low.to(tl.float16) * scales, high.to(tl.float16) * scales
