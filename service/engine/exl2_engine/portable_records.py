"""Records of `cache_store.layout` in a pool, encoded and decoded by plain torch on any device.

Bit for bit what `cache_store.codec` stores, but without ever waiting for the device: a group that cannot be stored
gets a NaN scale instead of an exception.
"""

import torch
from torch import Tensor

from cache_store.layout import BLOCK_TOKENS, GROUP, KVLayout

_TOKENS = 4096
"""Tokens decoded at a time: bounds the FP32 intermediates."""


def record_parts(records: Tensor, layout: KVLayout) -> list[Tensor]:
    """Views of k_codes, k_scales, v_codes, v_scales of full records uint8 ``[n, record]``, each as uint8
    ``[n, n_kv_heads, 256, bytes]``."""
    parts: list[Tensor] = []
    at = 0
    for nbytes in layout.part_nbytes(BLOCK_TOKENS):
        width = nbytes // (layout.n_kv_heads * BLOCK_TOKENS)
        parts.append(records[:, at : at + nbytes].unflatten(1, (layout.n_kv_heads, BLOCK_TOKENS, width)))
        at += nbytes
    return parts


def decode_blocks(pool: Tensor, blocks: Tensor, n_tokens: int, layout: KVLayout, k: Tensor, v: Tensor) -> None:
    """Decode the first `n_tokens` tokens of `blocks` into `k` and `v` ``[n_kv_heads, >= n_tokens, head_dim]``."""
    bits = (layout.kv_type.key_bits, layout.kv_type.value_bits)
    for first in range(0, n_tokens, _TOKENS):
        n = min(_TOKENS, n_tokens - first)
        chosen = blocks[first // BLOCK_TOKENS : -(-(first + n) // BLOCK_TOKENS)]
        parts = record_parts(pool.index_select(0, chosen), layout)
        for out, codes, scales, b in zip((k, v), parts[::2], parts[1::2], bits, strict=True):
            values = decoded(codes, scales, b).transpose(0, 1).flatten(1, 2)
            out[:, first : first + n] = values[:, :n]


def decoded(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Values ``[..., head_dim]`` of codes and scales ``[..., bytes]``: FP32 of 8 and 4 bits, FP16 of 16 bits."""
    if bits == 16:
        return codes.contiguous().view(torch.float16)
    ints = codes.contiguous().view(torch.int8) if bits == 8 else _unpacked(codes)
    groups = ints.float().unflatten(-1, (-1, GROUP))
    return (groups * scales.contiguous().view(torch.float16).float()[..., None]).flatten(-2)


def encode_blocks(k: Tensor, v: Tensor, layout: KVLayout, pool: Tensor, blocks: Tensor) -> None:
    """Store keys and values ``[n, n_kv_heads, head_dim]`` into the pool's blocks, from each block's first token."""
    bits = (layout.kv_type.key_bits, layout.kv_type.value_bits)
    full, rest = divmod(k.shape[0], BLOCK_TOKENS)
    for first, n_blocks, length in ((0, full, BLOCK_TOKENS), (full, int(rest > 0), rest)):
        if not n_blocks:
            continue
        chosen = blocks[first : first + n_blocks].long()
        parts = record_parts(pool, layout)
        for x, codes, scales, b in zip((k, v), parts[::2], parts[1::2], bits, strict=True):
            rows = x[first * BLOCK_TOKENS :][: n_blocks * length].unflatten(0, (n_blocks, length)).transpose(1, 2)
            new_codes, new_scales = encoded(rows, b)
            codes[chosen, :, :length] = new_codes
            if new_scales is not None:
                scales[chosen, :, :length] = new_scales


def encoded(x: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """Codes and scales, both uint8 ``[..., bytes]``, of values ``[..., head_dim]``; 16 bits have no scales."""
    if bits == 16:
        return x.to(torch.float16).contiguous().view(torch.uint8), None
    groups = x.float().unflatten(-1, (-1, GROUP))
    scale = _scales(groups, bits)
    divisor = scale.float()[..., None]
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    ints = (groups / divisor).round_().clamp_(low, high)
    ints = torch.where(torch.isfinite(divisor) & (divisor != 0), ints, 0.0).to(torch.int8).flatten(-2)
    return ints.view(torch.uint8) if bits == 8 else _packed(ints), scale.view(torch.uint8)


def _scales(groups: Tensor, bits: int) -> Tensor:
    """FP16 scales, NaN where a value is not finite or the scale is beyond FP16."""
    high, low = groups.amax(-1), groups.amin(-1)
    # A tensor on the device, because CUDA's division by a host number is a product with its rounded inverse.
    divisor = torch.full((), 127.0 if bits == 8 else -8.0, device=groups.device)
    extreme = torch.maximum(high, -low).abs() if bits == 8 else torch.where(high > -low, high, low)
    scale = (extreme / divisor).to(torch.float16)
    return torch.where(torch.isfinite(scale) & torch.isfinite(high) & torch.isfinite(low), scale, torch.nan)


def _packed(ints: Tensor) -> Tensor:
    nibbles = (ints + 8).view(torch.uint8).unflatten(-1, (-1, 2))
    return nibbles[..., 0] | nibbles[..., 1] << 4


def _unpacked(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).view(torch.int8) - 8
