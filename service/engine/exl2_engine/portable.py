"""Work on KV in plain torch: any device and dtype, no Triton; what cards of sm_70 and sm_75 use, and the CPU."""

import torch
from torch import Tensor

from cache_store.codec import rotate
from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine import portable_records
from service.engine.exl2_engine.portable_attend import attend
from service.engine.exl2_engine.prefill_attention import Partial, PrefillAttention
from service.engine.exl2_engine.sdpa import Method
from service.engine.exl2_engine.slots import LayerSlots
from service.engine.exl2_engine.step import Step
from service.engine.torch_engine import attention


class PortableBackend:
    """A `KVBackend`, in FP16 and FP32 only: cards before Ampere have no BF16. Only `attend` waits for the device."""

    can_be_captured = False

    def __init__(self, layout: KVLayout, device: torch.device | str, method: Method | None = None) -> None:
        """`method` forces the attention kernel of `prefill`; by default the best that works on the device."""
        self.layout = layout
        quantized = layout.kv_type is not KVType.FP16
        self._rotation = rotate(torch.eye(layout.head_dim)).to(device) if quantized else None
        self.prefill_attention = PrefillAttention(layout, self.decode, self, method)

    def rope_and_rotate(self, x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
        return self._rotated(_rope(x, positions, inv_freq, scaling)).to(x.dtype)

    def rotate(self, x: Tensor) -> Tensor:
        return self._rotated(x).to(x.dtype)

    def append(self, step: Step, k: Tensor, v: Tensor, tail_k: Tensor, tail_v: Tensor) -> None:
        written = step.tail_at >= 0
        rows = torch.arange(step.n_rows, device=written.device)
        # A row that writes nothing repeats what the first that does writes; if none does, all write what is there.
        source = torch.where(written, rows, written.int().argmax())
        slots, at = step.slots[source].long(), step.tail_at[source].clamp(min=0).long()
        for x, tail in ((k, tail_k), (v, tail_v)):
            new = torch.where(written[source, None, None], x[source].to(tail.dtype), tail[slots, :, at])
            tail[slots, :, at] = new

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
        portable_records.encode_blocks(k, v, self.layout, pool, blocks)

    def decode(self, pool: Tensor, blocks: Tensor, n_tokens: int, k: Tensor, v: Tensor) -> None:
        portable_records.decode_blocks(pool, blocks, n_tokens, self.layout, k, v)

    def merge(self, a: Partial, b: Partial) -> Partial:
        return Partial(*attention.merge(a.out.float(), a.lse, b.out.float(), b.lse))

    def finish(self, a: Partial, b: Partial | None, dtype: torch.dtype) -> Tensor:
        out = (a if b is None else self.merge(a, b)).out.flatten(0, 1).transpose(0, 1)
        return self._rotated(out).to(dtype)

    def _rotated(self, x: Tensor) -> Tensor:
        return x if self._rotation is None else x.float() @ self._rotation


def _rope(x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
    """RoPE of ``[rows, heads, head_dim]`` in FP32; only the first ``2 * len(inv_freq)`` dims are turned."""
    half = inv_freq.shape[0]
    angles = positions.float()[:, None, None] * inv_freq
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    first, second, rest = x.float().split((half, half, x.shape[2] - 2 * half), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
