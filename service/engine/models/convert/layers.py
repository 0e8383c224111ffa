"""Attention of exllamav2's modules as the engine that serves computes it, for calibration and for reference.

Without flash-attn exllamav2 0.3.2 attends without a causal mask when it prefills (`ExLlamaV2Attention._attn_torch`), so
its converter would calibrate on what no model ever sees. Its RoPE and its norms of queries and keys differ from those
of transformers too, for some models. So the whole function is replaced, by one that goes by our reading of the config.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from service.engine.exl2_engine.spec import ModelSpec

_MOST = 65504.0


class Attention:
    """Takes the place of `ExLlamaV2Attention.forward_torch`. Rows of one sequence each, from position 0."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._tables: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def __call__(
        self,
        module: Any,
        hidden_states: Tensor,
        cache: Any = None,
        attn_params: Any = None,
        past_len: int | None = None,
        intermediates: bool = False,
        **_: Any,
    ) -> Tensor | dict[str, Tensor]:
        """`hidden_states` ``[B, T, hidden]`` -> the same, or with what quantizing needs of the way there."""
        normed = module.pre_layernorm.forward(hidden_states)
        out = module.o_proj.forward(attended := self._attended(module, normed))
        out = (out + hidden_states).clamp_(-_MOST, _MOST)
        if not intermediates:
            return out
        return {"post_norm": normed, "attn_output": attended, "hidden_states": out}

    def _attended(self, module: Any, normed: Tensor) -> Tensor:
        spec, (n_rows, n_tokens, _) = self._spec, normed.shape
        q, k, v = (
            linear.forward(normed)[..., : n_heads * spec.head_dim].view(n_rows, n_tokens, n_heads, spec.head_dim)
            for linear, n_heads in (
                (module.q_proj, spec.n_heads), (module.k_proj, spec.n_kv_heads), (module.v_proj, spec.n_kv_heads),
            )
        )  # fmt: skip
        if module.q_norm is not None:
            q, k = (_normed(x, n.weight.data, spec.norm_eps) for x, n in ((q, module.q_norm), (k, module.k_norm)))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if module.layer_idx not in spec.without_rope:
            cos, sin = self._table(n_tokens, normed.device)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True)
        return attended.transpose(1, 2).reshape(n_rows, n_tokens, -1)

    def _table(self, n_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if (key := (n_tokens, device)) not in self._tables:
            angles = torch.outer(torch.arange(n_tokens, dtype=torch.float32), self._spec.frequencies).repeat(1, 2)
            scale = self._spec.rope_scaling
            self._tables = {key: ((angles.cos() * scale).to(device), (angles.sin() * scale).to(device))}
        return self._tables[key]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in FP32 of `x` ``[..., T, head_dim]``; halves are paired, as in transformers."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight
