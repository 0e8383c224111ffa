# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
"""What the kernels over vectors share: a *tile row* is one group of 32 values of one head's vector.

A program works on `T` tile rows ``[T, 32]``. Cutting along groups, not vectors, makes every head dim that is a multiple
of 32 work without padding.
"""

import triton
import triton.language as tl

FEW = 16384
"""Up to this many tile rows a program takes few of them, so that a decode step fills the card."""


def tile_rows(n: int) -> tuple[int, int]:
    """(tile rows per program, warps) for `n` tile rows in all."""
    return (16, 4) if n <= FEW else (64, 4)


@triton.jit
def hadamard(x, EXACT: tl.constexpr):
    """The codec's transform of FP32 ``[T, 32]``: a product with +-1 on the tensor cores, accurate to 22 bits.

    `EXACT` says that the values are FP16 numbers already, so that one product is enough.
    """
    bits = tl.arange(0, 32)[:, None] & tl.arange(0, 32)[None, :]
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    signs = (1 - 2 * (bits & 1)).to(tl.float16)
    high = x.to(tl.float16)
    out = tl.dot(high, signs)
    if not EXACT:
        low = (x - high.to(tl.float32)).to(tl.float16)
        out += tl.dot(low, signs)
    return out * 0.17677669529663687


@triton.jit
def row_head_dims(tile, heads, GROUPS: tl.constexpr):
    """Row and head ``[T, 1]`` and dims ``[T, 32]`` of tile rows of ``[rows, heads, head_dim]``."""
    group = tile % GROUPS
    vector = tile // GROUPS
    dims = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    return (vector // heads)[:, None], (vector % heads)[:, None], dims
