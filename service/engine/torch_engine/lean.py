"""The forward of few rows through a Llama-shaped model, without its modules.

At one row a sequence, transformers' modules cost about as much as reading the weights. Here a layer is seven
products and what lies between them: queries, keys and values in one, gate and up in one, residuals added within the
products; RoPE, the scale of the queries and the transform of the KV type are one small matrix for each row and kind of
head, made once a step. The weights are the modules' own (those multiplied as one become views of one tensor), so
documents go on being prefilled through the modules.

The residual stream lies feature by feature, ``[hidden, n]``: so the products give it, and for one row it is the row.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from service.engine.torch_engine.lean_rules import why_not
from service.engine.torch_engine.linear import MOST_ROWS, SlicedWeight
from service.engine.torch_engine.plan import StepPlan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of a layer; `qkv_bias` is ``[features, 1]``, `head_norm` ``[heads + kv_heads, head_dim]``."""

    norm: Tensor
    qkv: SlicedWeight
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    out: SlicedWeight
    mlp_norm: Tensor
    gate_up: SlicedWeight
    down: SlicedWeight


class LeanDecoder:
    """Computes logits of up to `MOST_ROWS` rows; `of` makes one for the models it knows."""

    def __init__(self, model: Any) -> None:
        config, attention = model.config, model.model.layers[0].self_attn
        self._d = attention.head_dim
        self._kv_heads = config.num_key_value_heads
        self._heads = config.num_attention_heads
        self._scale = attention.scaling
        self._eps = config.rms_norm_eps
        self._rotary = model.model.rotary_emb
        self._embedding = model.model.embed_tokens.weight
        self._layers = [_layer(layer) for layer in model.model.layers]
        self._norm = model.model.norm.weight
        self._head = SlicedWeight(model.lm_head.weight)

    @classmethod
    def of(cls, model: Any) -> "LeanDecoder | None":
        """The lean forward of a loaded model; None where transformers' modules have to do. Says which in the log."""
        if reason := why_not(model):
            log.info("rows are computed by transformers' modules: %s", reason)
            return None
        log.info("up to %d rows are computed by the lean forward", MOST_ROWS)
        return cls(model)

    def logits(self, tokens: Tensor, positions: Tensor, plan: StepPlan, wanted: Tensor) -> Tensor:
        """Logits FP32 ``[len(wanted), vocab]`` of the rows `wanted`; `tokens` and `positions` are ``[n]``."""
        x = F.embedding(tokens, self._embedding).t().contiguous()
        turns = self._turns(positions, plan.rotation)
        for i, layer in enumerate(self._layers):
            self._attend(i, layer, x, turns, plan)
            self._mlp(layer, x)
        return self._head.product(self._normed(x.t()[wanted], self._norm)).t().contiguous()

    def _attend(self, i: int, layer: _Layer, x: Tensor, turns: Tensor, plan: StepPlan) -> None:
        n, heads, kv_heads, d = x.shape[1], self._heads, self._kv_heads, self._d
        qkv = layer.qkv.product(self._normed(x.t(), layer.norm))
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        by_head = qkv.t().contiguous().view(n, -1, d)
        if layer.head_norm is not None:
            normed = F.rms_norm(by_head[:, : heads + kv_heads], (d,), None, self._eps) * layer.head_norm
            by_head = torch.cat((normed, by_head[:, heads + kv_heads :]), 1)
        turned = torch.bmm(by_head.reshape(-1, kv_heads, d), turns).view(n, -1, d).transpose(0, 1)
        q, k, v = turned.split((heads, kv_heads, kv_heads))
        out = plan.attend_scaled(i, q, k, v)
        if plan.rotation is not None:
            # As a batch: one product of a few rows would be shared by threads that cost more than it.
            out = torch.bmm(out.view(kv_heads, -1, d), plan.rotation.expand(kv_heads, d, d)).view(out.shape)
        layer.out.add_product(x, out.transpose(0, 1).reshape(n, -1))

    def _mlp(self, layer: _Layer, x: Tensor) -> None:
        gate, up = layer.gate_up.product(self._normed(x.t(), layer.mlp_norm)).chunk(2)
        layer.down.add_product(x, F.silu(gate, inplace=True).mul_(up).t())

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(rows.contiguous(), weight.shape, weight, self._eps)

    def _turns(self, positions: Tensor, rotation: Tensor | None) -> Tensor:
        """What each head is multiplied by, ``[n * (groups + 2), d, d]``: `kv_heads` heads share a matrix, for every row
        first those of queries (RoPE, scale, transform), then that of keys, then that of values (transform alone)."""
        groups, d = self._heads // self._kv_heads, self._d
        cos, sin = (x[0, :, :, None] for x in self._rotary(self._norm, positions[None]))
        transform = torch.eye(d) if rotation is None else rotation
        # x * cos + rotate_half(x) * sin, as a matrix: the halves of the rows under `sin` change places, one negated.
        crossed = sin * transform
        rope = cos * transform + torch.cat((crossed[:, d // 2 :], -crossed[:, : d // 2]), 1)
        turns = torch.empty(len(positions), groups + 2, d, d)
        turns[:, :groups] = (rope * self._scale)[:, None]
        turns[:, groups] = rope
        turns[:, groups + 1] = transform
        return turns.view(-1, d, d)


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _Layer(
        norm=layer.input_layernorm.weight,
        qkv=SlicedWeight(_joined(*projections)),
        qkv_bias=_joined_bias(*projections),
        head_norm=_head_norm(attention),
        out=SlicedWeight(attention.o_proj.weight),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=SlicedWeight(_joined(mlp.gate_proj, mlp.up_proj)),
        down=SlicedWeight(mlp.down_proj.weight),
    )


def _joined(*modules: Any) -> Tensor:
    """The modules' weights as one tensor, of which each becomes a view: nothing is held twice."""
    joined = torch.cat([module.weight for module in modules])
    for module, part in zip(modules, joined.split([len(m.weight) for m in modules]), strict=True):
        module.weight = nn.Parameter(part, requires_grad=False)
    return joined


def _joined_bias(*modules: Any) -> Tensor | None:
    if all(module.bias is None for module in modules):
        return None
    return torch.cat([module.bias for module in modules])[:, None]


def _head_norm(attention: Any) -> Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    config = attention.config
    counts = (config.num_attention_heads, config.num_key_value_heads)
    weights = (attention.q_norm.weight, attention.k_norm.weight)
    return torch.cat([weight.expand(n, -1) for weight, n in zip(weights, counts, strict=True)])
