"""Which products a model's layers use for few rows: ours where they read a layer's matrices, else exllamav2's."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from service.engine.exl2_engine.matrices import Matrix, matrix_of

if TYPE_CHECKING:
    from service.engine.exl2_engine.products import Product

log = logging.getLogger(__name__)

ProductChoice = Literal["auto", "triton", "exllamav2"]
FEW_ROWS = 32
"""Beyond, exllamav2 turns the weights to FP16 once and multiplies with cuBLAS."""
MEASURED = (9, 0)
"""From this generation of cards on, `auto` takes ours for EXL2 matrices: what was checked and measured on a card."""


@dataclass(frozen=True, slots=True)
class LayerProducts:
    """Products of one layer; None where exllamav2's is used. Rows are FP16, 32 at most."""

    attention: Any
    mlp: Any
    qkv: "Product | None"
    out: "Product | None"
    gate_up: "Product | None"
    down: "Product | None"

    def queries_keys_values(self, x: Tensor) -> list[Tensor] | None:
        """``[rows, n]`` of each, after the input norm."""
        if self.qkv is None:
            return None
        norm = self.attention.pre_layernorm
        return self.qkv.finish(self.qkv.shares(self.qkv.arrange(x, norm.weight, norm.variance_epsilon)))

    def add_attention(self, rows: Tensor, x: Tensor) -> bool:
        """Add the output projection of ``[rows, heads * head_dim]`` to `x`, in place."""
        if self.out is None:
            return False
        self.out.finish(self.out.shares(self.out.arrange(rows)), x)
        return True

    def add_mlp(self, x: Tensor) -> bool:
        """Add norm and MLP of `x` to it, in place."""
        if self.gate_up is None or self.down is None:
            return False
        norm = self.mlp.pre_layernorm
        part = self.gate_up.shares(self.gate_up.arrange(x, norm.weight, norm.variance_epsilon))
        self.down.finish(self.down.shares(self.gate_up.gate(part, self.down)), x)
        return True


def layer_products(attention: Any, mlp: Any, *, gptq: bool = True) -> LayerProducts:
    """From exllamav2's modules of a layer, loaded. `gptq`: also of GPTQ matrices."""
    qkv = _product(attention.q_proj, attention.k_proj, attention.v_proj, gptq=gptq)
    out = _product(attention.o_proj, gptq=gptq)
    gate_up, down = _product(mlp.gate_proj, mlp.up_proj, gptq=gptq), _product(mlp.down_proj, gptq=gptq)
    return LayerProducts(attention, mlp, qkv, out, gate_up if down else None, down if gate_up else None)


def all_products(attentions: Iterable[Any], mlps: Iterable[Any], choice: ProductChoice) -> list[LayerProducts]:
    """Of every layer, or none where exllamav2's product is chosen. Raises ValueError when ours is asked for by name on
    a card that it does not reach."""
    capability, problem = torch.cuda.get_device_capability(torch.device("cuda", 0)), None
    if capability < (8, 0):
        problem = "it needs a card of sm_80 or newer"
    elif find_spec("triton") is None:
        problem = "triton is not installed"
    if choice == "triton" and problem:
        raise ValueError(f"the Triton product cannot be used: {problem}")
    by_name = choice == "triton"
    if problem or not (by_name or (choice == "auto" and capability >= MEASURED)):
        return []
    layers = [layer_products(attention, mlp, gptq=by_name) for attention, mlp in zip(attentions, mlps, strict=True)]
    parts = [part for layer in layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    log.info("%d of %d products of few rows are our own", sum(p is not None for p in parts), len(parts))
    return layers


def all_ours(layer: LayerProducts) -> bool:
    """Whether no matrix of a layer is left to exllamav2."""
    return None not in (layer.qkv, layer.out, layer.gate_up, layer.down)


def _product(*linears: Any, gptq: bool) -> "Product | None":
    from service.engine.exl2_engine.products import Product

    matrices: list[Matrix] = []
    for linear in linears:
        tensors = linear.q_tensors if linear is not None and not linear.padding else None
        matrix = matrix_of(tensors)
        if matrix is None or (matrix.gptq and not gptq):
            return None
        matrices.append(matrix)
    try:
        return Product(matrices)
    except ValueError:  # of different kinds
        return None
