"""Work on KV by Triton kernels: cards of sm_80 and newer."""

from torch import Tensor

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.kernels import append, decode_blocks, encode, rope
from service.engine.exl2_engine.kernels.attend import attend
from service.engine.exl2_engine.kernels.prefill_merge import TritonMerger
from service.engine.exl2_engine.prefill_attention import PrefillAttention
from service.engine.exl2_engine.sdpa import Method
from service.engine.exl2_engine.slots import LayerSlots
from service.engine.exl2_engine.step import Step


class TritonBackend:
    """A `KVBackend`, and `fused_append` beside it: what a decode step does before attention, in one launch."""

    can_be_captured = True

    def __init__(self, layout: KVLayout, method: Method | None = None) -> None:
        """`method` forces the attention kernel of `prefill`; by default the best that works on the device."""
        self.layout = layout
        self._turn = layout.kv_type is not KVType.FP16
        self.prefill_attention = PrefillAttention(layout, self.decode, TritonMerger(turn=self._turn), method)

    def rope_and_rotate(self, x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
        return rope.rope_and_rotate(x, positions, inv_freq, scaling, turn=self._turn)

    def rotate(self, x: Tensor) -> Tensor:
        return rope.rotate(x) if self._turn else x

    def append(self, step: Step, k: Tensor, v: Tensor, tail_k: Tensor, tail_v: Tensor) -> None:
        append.append(step, k, v, tail_k, tail_v)

    def fused_append(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: Step,
        inv_freq: Tensor,
        scaling: float,
        tail_k: Tensor,
        tail_v: Tensor,
    ) -> Tensor:
        """`rope_and_rotate` of `q` and `k` ``[R, heads, head_dim]``, `rotate` of `v`, and `append`; gives the
        queries."""
        return append.fused_append(q, k, v, step, inv_freq, scaling, tail_k, tail_v, turn=self._turn)

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
        return attend(step, q, pool, tail_k, tail_v, scale, self.layout, bias, slots)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, blocks: Tensor, n_past: int, scale: float
    ) -> Tensor:
        return self.prefill_attention(q, k, v, pool, blocks, n_past, scale)

    def encode(self, k: Tensor, v: Tensor, pool: Tensor, blocks: Tensor) -> None:
        encode.encode(k, v, pool, blocks, self.layout)

    def decode(self, pool: Tensor, blocks: Tensor, n_tokens: int, k: Tensor, v: Tensor) -> None:
        decode_blocks.decode_blocks(pool, blocks, n_tokens, k, v, self.layout)
