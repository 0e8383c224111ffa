# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
"""Words of eight 4-bit weights, as exllamav2 leaves them after loading, to FP16.

exllamav2 shuffles a word (qdq_4.cuh) so that its low half holds the weights 0, 2, 4, 6 and its high half 1, 3, 5, 7,
each from the lowest bits on. Two words, neighbours along the inputs, are taken at once: weight j of both is one
register of two FP16 numbers, as the tensor cores take their operand. A code n is the low mantissa bits of 1024 + n or
of 1024 + 16 n; subtracting makes it n - zero, exactly.
"""

import triton
import triton.language as tl

_FP16 = tl.float16
_EIGHT = tl.constexpr((_FP16, _FP16, _FP16, _FP16, _FP16, _FP16, _FP16, _FP16))
_HEAD = """{
    .reg .b32 l, h, m, c, d, e, a, b;
    prmt.b32 l, $8, $9, 0x5410;
    prmt.b32 h, $8, $9, 0x7632;
    mov.b32 m, 0x64006400;
    mov.b32 d, 0x2C002C00;
    mov.b32 a, 0x000F000F;
    mov.b32 b, 0x00F000F0;
"""
# The number that is subtracted from 1024 + n, and the one added to n + 64: for a zero of 8, and for one in $10.
_ZERO_8 = """
    mov.b32 c, 0x64086408;
    mov.b32 e, 0xD480D480;
"""
_ANY_ZERO = """
    add.rn.f16x2 c, $10, m;
    mov.b32 e, 0xD400D400;
    sub.rn.f16x2 e, e, $10;
"""
_TAIL = """
    lop3.b32 $0, l, a, m, 0xEA;
    lop3.b32 $1, h, a, m, 0xEA;
    lop3.b32 $2, l, b, m, 0xEA;
    lop3.b32 $3, h, b, m, 0xEA;
    shr.u32 l, l, 8;
    shr.u32 h, h, 8;
    lop3.b32 $4, l, a, m, 0xEA;
    lop3.b32 $5, h, a, m, 0xEA;
    lop3.b32 $6, l, b, m, 0xEA;
    lop3.b32 $7, h, b, m, 0xEA;
    sub.rn.f16x2 $0, $0, c;
    sub.rn.f16x2 $1, $1, c;
    fma.rn.f16x2 $2, $2, d, e;
    fma.rn.f16x2 $3, $3, d, e;
    sub.rn.f16x2 $4, $4, c;
    sub.rn.f16x2 $5, $5, c;
    fma.rn.f16x2 $6, $6, d, e;
    fma.rn.f16x2 $7, $7, d, e;
}"""
_OUT = ",".join(["=r"] * 8)
_WITH_ZERO_8 = tl.constexpr(_HEAD + _ZERO_8 + _TAIL)
_WITH_ZERO = tl.constexpr(_HEAD + _ANY_ZERO + _TAIL)
_ONE_INPUT = tl.constexpr(_OUT + ",r,r")
_TWO_INPUTS = tl.constexpr(_OUT + ",r,r,r")


@triton.jit
def _nibble(words, zeros, SHIFT: tl.constexpr):
    return (((words >> SHIFT) & 15).to(tl.float16) - zeros).to(tl.float16)


@triton.jit
def codes_of(words, zeros, ZERO_8: tl.constexpr, FAST: tl.constexpr):
    """The eight weights of words int32, each less `zeros` (FP16, of their shape), in order of the inputs: eight FP16
    tensors. `ZERO_8`: all zeros are 8, whatever was given. `FAST`: by PTX, which the interpreter does not know."""
    if FAST and ZERO_8:
        out = tl.inline_asm_elementwise(_WITH_ZERO_8, _ONE_INPUT, [words], _EIGHT, is_pure=True, pack=2)
    elif FAST:
        out = tl.inline_asm_elementwise(_WITH_ZERO, _TWO_INPUTS, [words, zeros], _EIGHT, is_pure=True, pack=2)
    else:
        z = 8.0 if ZERO_8 else zeros
        out = (
            _nibble(words, z, 0), _nibble(words, z, 16), _nibble(words, z, 4), _nibble(words, z, 20),
            _nibble(words, z, 8), _nibble(words, z, 24), _nibble(words, z, 12), _nibble(words, z, 28),
        )  # fmt: skip
    return out
