"""The seam between the runner and the code that works on KV: Triton kernels, or plain torch where Triton does not
reach. Both give the same results up to rounding; a setting forces one of them.

A *pool* is one layer's blocks: uint8 ``[n_blocks, layout.record_nbytes(block_tokens)]``. A block always has the inner
layout of a full record (``k_codes | k_scales | v_codes | v_scales``, each ``[n_kv_heads, 256, ...]``), also when
fewer of its tokens are in use. Tails are FP16 (or the compute dtype) ``[n_slots, n_kv_heads, tail_tokens, head_dim]``
in the rotated space.
"""

from typing import Protocol

from torch import Tensor

from cache_store.layout import KVLayout
from service.engine.exl2_engine.prefill_attention import PrefillAttention
from service.engine.exl2_engine.slots import LayerSlots
from service.engine.exl2_engine.step import Step


class KVBackend(Protocol):
    """Work on the KV of one layer. `layout` and the device are fixed when a backend is made. `prefill_attention` is
    what `prefill` does, for keys and values from elsewhere. `can_be_captured`: whether `attend` goes into a CUDA
    graph."""

    layout: KVLayout
    can_be_captured: bool
    prefill_attention: PrefillAttention

    def rope_and_rotate(self, x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
        """Queries or keys ``[rows, heads, head_dim]`` after RoPE (rotate-half, angles in FP32, cos and sin times
        `scaling`) and the codec's transform; for FP16 KV without the transform. Same dtype as `x`."""
        ...

    def rotate(self, x: Tensor) -> Tensor:
        """The codec's transform of ``[rows, heads, head_dim]`` (values; also undoes it); FP16 KV: as it is."""
        ...

    def append(self, step: Step, k: Tensor, v: Tensor, tail_k: Tensor, tail_v: Tensor) -> None:
        """Write rows' transformed keys and values ``[R, n_kv_heads, head_dim]`` behind their tails."""
        ...

    def attend(
        self,
        step: Step,
        q: Tensor,
        pool: Tensor,
        tail_k: Tensor,
        tail_v: Tensor,
        scale: float,
        bias: Tensor | None = None,
        slots: LayerSlots | None = None,
    ) -> Tensor:
        """Attention of transformed queries ``[R, n_heads, head_dim]``: every row over its group's document (one pass
        over the blocks for all rows of a group), then over its own tail; merged by log-sum-exp and transformed back.
        Gives ``[R, n_heads, head_dim]``. `bias` is FP16 ``[n_blocks, n_kv_heads, 256]``, added to the scores of
        a document's rows. `slots`: needed where `step` has some; then there is no bias."""
        ...

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, blocks: Tensor, n_past: int, scale: float
    ) -> Tensor:
        """Attention of a document chunk ``[n, heads, head_dim]`` (all transformed): over the decoded form of the first
        `n_past` tokens in `blocks` (int32 on the device), and causally over the chunk itself as computed. Transformed
        back. `n_past` is a multiple of the block size."""
        ...

    def encode(self, k: Tensor, v: Tensor, pool: Tensor, blocks: Tensor) -> None:
        """Store transformed keys and values ``[n, n_kv_heads, head_dim]`` into the pool's blocks `blocks`
        (``ceil(n / 256)`` of them, from each block's first token), as `cache_store.codec` encodes. NaN and infinity
        must not pass silently: their group's scale is stored as NaN."""
        ...

    def decode(self, pool: Tensor, blocks: Tensor, n_tokens: int, k: Tensor, v: Tensor) -> None:
        """Decode the first `n_tokens` tokens of `blocks` into ``[n_kv_heads, >= n_tokens, head_dim]`` tensors (any
        strides in the first two dims), still transformed."""
        ...
