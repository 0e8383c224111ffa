"""A `DecoderModel` over exllamav2's quantized matrices (EXL2, GPTQ) and FP16 ones.

exllamav2's modules are taken apart: its norms, matrix products and fused MLP are called directly, with rows of any
sequences; queries and keys leave before RoPE, which is ours. Everything runs on the current stream: exllamav2's
functions take torch's (`at::cuda::getCurrentCUDAStream`), so they can be captured into a CUDA graph.
"""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from service.engine.exl2_engine.documents import DocumentModel
from service.engine.exl2_engine.exllama_loading import load_modules
from service.engine.exl2_engine.few_rows import FEW_ROWS, LayerProducts, ProductChoice, all_ours, all_products
from service.engine.exl2_engine.model import UnsupportedModel
from service.engine.exl2_engine.spec import ModelSpec, read_spec

TUNING_CALLS = 201
"""The EXL2 product measures the first 200 calls of each shape of up to 4 rows, waiting for the card, then decides
(q_gemm.cu, AT_NUM_MEASURE). A wait invalidates a capture, so shapes must be decided before."""
_TUNED_ROWS = 4
"""Rows that its product multiplies at a time: it reads a matrix once for each four."""
_MOST = 65504.0
"""Largest FP16 number."""


class ExllamaModel:
    """Attributes and methods are those of `DecoderModel`; FP16 on the first card."""

    dtype = torch.float16

    def __init__(self, spec: ModelSpec, modules: Any, max_rows: int, product: ProductChoice = "auto") -> None:
        """`modules`: exllamav2's model (`load_modules`). `product`: of up to `FEW_ROWS` rows. Raises UnsupportedModel
        for a projection without weights, ValueError for a product that does not run here."""
        from exllamav2.ext import exllamav2_ext, none_tensor  # pyright: ignore[reportMissingImports]

        self.spec = spec
        self.device = torch.device("cuda", 0)
        self.n_layers, self.n_heads, self.n_kv_heads = spec.n_layers, spec.n_heads, spec.n_kv_heads
        self.head_dim, self.hidden_size, self.vocab_size = spec.head_dim, spec.hidden_size, spec.vocab_size
        self.scale = spec.scale
        self._max_rows = max_rows
        self._ext, self._none = exllamav2_ext, none_tensor
        self._modules = modules
        # embedding, (attention, MLP) of each layer, norm, head: `ExLlamaV2.__init__`
        self.attentions = modules.modules[1:-2:2]
        self.mlps = modules.modules[2:-2:2]
        self._norm, self._head = modules.modules[-2:]
        for linear in self.linears():
            if linear.q_handle is None and linear.linear is None:
                raise UnsupportedModel(f"exllamav2 finds no weights of {linear.key} that it can read")
        self._few = all_products(self.attentions, self.mlps, product)
        self._embedding = self._embedding_weight()
        self._rope = spec.frequencies.to(self.device), spec.rope_scaling
        self._no_rope = torch.zeros_like(self._rope[0]), 1.0

    @classmethod
    def load(
        cls, model_dir: Path, *, max_rows: int, max_dq_elements: int, product: ProductChoice = "auto"
    ) -> "ExllamaModel":
        """Load a model directory. Raises UnsupportedModel, ArchitectureRefused, ImportError without exllamav2, and
        what the constructor raises."""
        spec = read_spec(model_dir)
        with torch.inference_mode():
            return cls(spec, load_modules(model_dir, spec, max_rows, max_dq_elements), max_rows, product)

    @property
    def cheap_rows(self) -> int:
        """The head is left out: it is a twentieth of the weights."""
        of_layers = [linear.q_handle is None for linear in list(self.linears())[:-1]]
        return FEW_ROWS if all(of_layers) or (self._few and all(map(all_ours, self._few))) else _TUNED_ROWS

    @property
    def for_documents(self) -> DocumentModel:
        """The same model, with exllamav2's product for any number of rows: what documents' KV is does not depend on
        which product answers use."""
        other = copy.copy(self)
        other._few = []
        return DocumentModel(other)

    def linears(self) -> Iterable[Any]:
        """exllamav2's linears, in the order of the layers, the head last."""
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
            yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        yield self._head

    def settle(self, row_counts: Iterable[int]) -> None:
        """Have exllamav2 decide how to multiply each shape of matrix with these numbers of rows."""
        shapes = {(linear.in_features, linear.out_features): linear for linear in self.linears() if _is_exl2(linear)}
        for n_rows in sorted(set(row_counts)):
            for (n_in, _), linear in shapes.items():
                x = torch.zeros((n_rows, n_in), dtype=self.dtype, device=self.device)
                for _ in range(TUNING_CALLS):
                    self._linear(linear, x)

    def rope(self, layer: int) -> tuple[Tensor, float]:
        return self._no_rope if layer in self.spec.without_rope else self._rope

    def embed(self, ids: Tensor) -> Tensor:
        x = functional.embedding(ids, self._embedding)
        return x if self.spec.embedding_factor == 1 else x * self.spec.embedding_factor

    def qkv(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention, few = self.attentions[layer], self._few_of(layer, x)
        parts = few.queries_keys_values(x) if few else None
        if parts is None:
            normed = self._normed(attention.pre_layernorm, x)
            parts = [self._linear(linear, normed) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in parts)
        if attention.q_norm is not None:
            self._norm_heads(attention.q_norm, q)
            self._norm_heads(attention.k_norm, k)
        return q, k, v

    def attention_out(self, layer: int, attention: Tensor, x: Tensor) -> Tensor:
        module, rows, few = self.attentions[layer], attention.reshape(len(x), -1), self._few_of(layer, x)
        if few and few.add_attention(rows, x):
            return x
        if module.q_handle is None:
            return x + self._linear(module.o_proj, rows)
        self._ext.q_attn_forward_2(module.q_handle, x, rows, 1, len(x), [], self._none)
        return x

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        module, few = self.mlps[layer], self._few_of(layer, x)
        if few and few.add_mlp(x):
            return x
        if module.q_handle is None:
            return self._plain_mlp(module, x)
        for part in x.split(self._max_rows):  # exllamav2's scratch is made for this many
            self._ext.q_mlp_forward_(module.q_handle, part, [], self._none)
        return x

    def head(self, x: Tensor) -> Tensor:
        return self._linear(self._head, self._normed(self._norm, x))[:, : self.vocab_size]

    def _few_of(self, layer: int, x: Tensor) -> LayerProducts | None:
        """Our own products of a layer, where `x` has few rows."""
        return self._few[layer] if self._few and len(x) <= FEW_ROWS else None

    def _embedding_weight(self) -> Tensor:
        """On the card; one with the head where the model has them tied and the head is not quantized."""
        embedding = self._modules.modules[0]
        if self.spec.tied_head and self._head.linear is not None:
            weight = self._head.linear.weight.data[: self.vocab_size]
        else:
            weight = embedding.embedding.weight.data.to(self.device)
        embedding.unload()
        return weight

    def _normed(self, norm: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._ext.rms_norm(x, norm.weight, out, norm.variance_epsilon)
        return out

    def _norm_heads(self, norm: Any, x: Tensor) -> None:
        """In place. Always root mean square: exllamav2's own module subtracts the mean for Qwen3, transformers not."""
        self._ext.head_norm(x, norm.weight.data, self._none, x, norm.variance_epsilon, True)

    def _linear(self, linear: Any, x: Tensor) -> Tensor:
        """``[R, out]``, without the columns that exllamav2 pads with."""
        if linear.q_handle is not None:
            out = torch.empty((len(x), linear.out_features), dtype=self.dtype, device=self.device)
            self._ext.gemm_half_q_half(x, linear.q_handle, out, False)
        else:
            out = functional.linear(x, linear.linear.weight, linear.linear.bias if linear.has_bias else None)
            out = out if linear.prescale == 1 else out * linear.prescale
        return out[:, : out.shape[1] - linear.padding] if linear.padding else out

    def _plain_mlp(self, module: Any, x: Tensor) -> Tensor:
        normed = self._normed(module.pre_layernorm, x)
        y = functional.silu(self._linear(module.gate_proj, normed)) * self._linear(module.up_proj, normed)
        return x + self._linear(module.down_proj, y.clamp_(-_MOST, _MOST))


def _is_exl2(linear: Any) -> bool:
    return linear.q_tensors is not None and "q_weight" in linear.q_tensors
