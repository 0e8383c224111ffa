"""KV types and the byte layout of a block: the one definition every engine and kernel follows.

One *record* is the KV of one (block, layer): ``k_codes | k_scales | v_codes | v_scales``, each part
head-major ``[n_kv_heads, n_tokens, ...]`` and tightly packed. A KV type of 16 bits has no scales.
"""

from dataclasses import dataclass
from enum import StrEnum

BLOCK_TOKENS = 256
GROUP = 32
"""Values that share one fp16 scale, along the head dim; also the length of the Hadamard transform."""
LAYOUT_VERSION = 1


class KVType(StrEnum):
    """Bits of keys and values; `fp16` is the unquantized reference."""

    FP16 = "fp16"
    K8V8 = "k8v8"
    K8V4 = "k8v4"
    K4V4 = "k4v4"

    @property
    def key_bits(self) -> int:
        return _BITS[self][0]

    @property
    def value_bits(self) -> int:
        return _BITS[self][1]


_BITS = {KVType.FP16: (16, 16), KVType.K8V8: (8, 8), KVType.K8V4: (8, 4), KVType.K4V4: (4, 4)}


def packed_nbytes(bits: int, head_dim: int) -> tuple[int, int]:
    """Bytes of the codes and of the scales of one head's vector of `head_dim` values."""
    codes = head_dim * bits // 8
    return codes, 0 if bits == 16 else head_dim // GROUP * 2


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a model's KV cache in one KV type.

    Raises ValueError when the head dim is not a multiple of 32.
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int
    kv_type: KVType
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if self.head_dim % GROUP:
            raise ValueError(f"head dim {self.head_dim} is not a multiple of {GROUP}")

    def part_nbytes(self, n_tokens: int) -> tuple[int, int, int, int]:
        """Bytes of k_codes, k_scales, v_codes, v_scales of one record of `n_tokens` tokens."""
        rows = self.n_kv_heads * n_tokens
        kc, ks = packed_nbytes(self.kv_type.key_bits, self.head_dim)
        vc, vs = packed_nbytes(self.kv_type.value_bits, self.head_dim)
        return rows * kc, rows * ks, rows * vc, rows * vs

    def record_nbytes(self, n_tokens: int) -> int:
        """Bytes of one (block, layer) record of `n_tokens` tokens."""
        return sum(self.part_nbytes(n_tokens))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers, keys and values and scales."""
        return self.record_nbytes(1) * self.n_layers

    def n_blocks(self, n_tokens: int) -> int:
        """Blocks that hold `n_tokens` tokens; the last may be partial."""
        return -(-n_tokens // self.block_tokens)

    def block_lengths(self, n_tokens: int) -> list[int]:
        """Tokens in each block of a snapshot of `n_tokens` tokens."""
        full, rest = divmod(n_tokens, self.block_tokens)
        return [self.block_tokens] * full + ([rest] if rest else [])
