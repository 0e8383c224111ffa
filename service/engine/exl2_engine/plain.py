"""A `DecoderModel` in plain torch: any device and dtype. The reference that exllamav2's modules are compared with, and
what the engine is tested with on a CPU."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from service.engine.exl2_engine.spec import ModelSpec, read_spec

Get = Callable[[str], Tensor]
"""A tensor by its name in the model's files."""


@dataclass(slots=True)
class Linear:
    """``x @ weight^T + bias``; `weight` is ``[out, in]``."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class Layer:
    input_norm: Tensor
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear


class PlainModel:
    """Attributes and methods are those of `DecoderModel`."""

    cheap_rows = 32

    def __init__(self, spec: ModelSpec, get: Get, dtype: torch.dtype, device: torch.device | str) -> None:
        """`get` is called once for each tensor that is needed. Raises what it raises for a name it does not know."""
        self.spec = spec
        self.dtype = dtype
        self.device = torch.device(device)
        self.n_layers, self.n_heads, self.n_kv_heads = spec.n_layers, spec.n_heads, spec.n_kv_heads
        self.head_dim, self.hidden_size, self.vocab_size = spec.head_dim, spec.hidden_size, spec.vocab_size
        self.scale = spec.scale
        self._rope = spec.frequencies.to(self.device), spec.rope_scaling
        self._no_rope = torch.zeros_like(self._rope[0]), 1.0

        def read(name: str) -> Tensor:
            return get(name).to(self.device, dtype)

        self.layers = [_layer(spec, read, f"model.layers.{i}") for i in range(spec.n_layers)]
        self._embedding = read("model.embed_tokens.weight")
        self._norm = read("model.norm.weight")
        self._head = self._embedding if spec.tied_head else read("lm_head.weight")

    @classmethod
    def load(cls, model_dir: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> "PlainModel":
        """Load unquantized safetensors. Raises UnsupportedModel, ArchitectureRefused, KeyError for a missing tensor."""
        return cls(read_spec(model_dir), file_tensors(model_dir), dtype, device)

    def settle(self, row_counts: Iterable[int]) -> None:
        """There is nothing to settle."""

    def rope(self, layer: int) -> tuple[Tensor, float]:
        return self._no_rope if layer in self.spec.without_rope else self._rope

    def embed(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self._embedding) * self.spec.embedding_factor

    def qkv(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w, rows = self.layers[layer], x.shape[0]
        x = rms_norm(x, w.input_norm, self.spec.norm_eps)
        q, k, v = (linear(x).view(rows, -1, self.head_dim) for linear in (w.q, w.k, w.v))
        if w.q_norm is not None and w.k_norm is not None:
            q, k = rms_norm(q, w.q_norm, self.spec.norm_eps), rms_norm(k, w.k_norm, self.spec.norm_eps)
        return q, k, v

    def attention_out(self, layer: int, attention: Tensor, x: Tensor) -> Tensor:
        return x + self.layers[layer].o(attention.flatten(1)) * self.spec.residual_factor

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        w = self.layers[layer]
        normed = rms_norm(x, w.mlp_norm, self.spec.norm_eps)
        return x + w.down(functional.silu(w.gate(normed)) * w.up(normed)) * self.spec.residual_factor

    def head(self, x: Tensor) -> Tensor:
        return functional.linear(rms_norm(x, self._norm, self.spec.norm_eps), self._head) * self.spec.logit_factor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dim, computed in FP32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def file_tensors(model_dir: Path) -> Get:
    """Tensors of a directory's safetensors files. Raises KeyError for a name that none of them has."""
    files = [safe_open(path, framework="pt") for path in sorted(model_dir.glob("*.safetensors"))]
    places = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - these are no dicts
    return lambda name: places[name].get_tensor(name)


def _layer(spec: ModelSpec, get: Get, name: str) -> Layer:
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    q, k, v = _qkv(spec, get, attention)
    gate, up = _gate_up(spec, get, mlp)
    return Layer(
        input_norm=get(f"{name}.input_layernorm.weight"),
        q=q,
        k=k,
        v=v,
        o=_linear(get, f"{attention}.o_proj", spec.bias_o),
        q_norm=get(f"{attention}.q_norm.weight") if spec.qk_norm else None,
        k_norm=get(f"{attention}.k_norm.weight") if spec.qk_norm else None,
        mlp_norm=get(f"{name}.post_attention_layernorm.weight"),
        gate=gate,
        up=up,
        down=_linear(get, f"{mlp}.down_proj", spec.bias_mlp),
    )


def _qkv(spec: ModelSpec, get: Get, name: str) -> list[Linear]:
    if not spec.fused:
        return [_linear(get, f"{name}.{part}_proj", spec.bias_qkv) for part in "qkv"]
    widths = [n * spec.head_dim for n in (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)]
    return [Linear(part, None) for part in get(f"{name}.qkv_proj.weight").split(widths)]


def _gate_up(spec: ModelSpec, get: Get, name: str) -> list[Linear]:
    if not spec.fused:
        return [_linear(get, f"{name}.{part}_proj", spec.bias_mlp) for part in ("gate", "up")]
    return [Linear(part, None) for part in get(f"{name}.gate_up_proj.weight").split(spec.intermediate_size)]


def _linear(get: Get, name: str, bias: bool) -> Linear:
    return Linear(get(f"{name}.weight"), get(f"{name}.bias") if bias else None)
