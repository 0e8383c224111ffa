"""The forward of few rows through a Llama-shaped model, without its modules.

At one row a sequence, transformers' modules and Python cost half as much as reading the weights. Here a layer is a few
products and what lies between them: queries, keys and values in one, gate and up in one, residuals added within the
products; RoPE, the scale of the queries and the transform of the KV type are one small matrix for each row and kind of
head, made once a step. Every layer computes in the same tensors, of which all views are made beforehand. The weights
are the modules' own (those multiplied as one become views of one tensor): documents are prefilled through the modules.

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

_KEPT_ROWS = 8


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


class _Space:
    """Tensors for `n` rows, overwritten in every layer, and all views of them that a layer takes."""

    def __init__(self, n: int, layer: _Layer, heads: int, kv_heads: int, d: int) -> None:
        hidden, width = len(layer.norm), layer.down.weight.shape[1]
        all_heads = heads + 2 * kv_heads
        self.x = torch.empty(hidden, n)
        self.rows, self.x_out, self.x_down = self.x.t(), layer.out.slices(self.x), layer.down.slices(self.x)
        self.normed = torch.empty(n, hidden)
        self.qkv_columns, self.gate_up_columns = (w.columns(self.normed) for w in (layer.qkv, layer.gate_up))
        self.qkv = torch.empty(all_heads * d, n)
        self.qkv_slices, self.qkv_rows = layer.qkv.slices(self.qkv), self.qkv.t()
        self.by_row = self.qkv_rows if n == 1 else torch.empty(n, all_heads * d)
        by_head = self.by_row.view(n, all_heads, d)
        self.normed_heads, self.heads = by_head[:, : heads + kv_heads], by_head.view(-1, kv_heads, d)
        self.turned = torch.empty_like(self.heads)
        turned = self.turned.view(n, all_heads, d).transpose(0, 1)
        self.queries_keys_values = turned.split((heads, kv_heads, kv_heads))
        self.by_kv_head = (kv_heads, heads // kv_heads * n, d)
        attended = torch.empty(n, heads * d)
        self.attended_by_head = attended.view(n, heads, d).transpose(0, 1)
        self.attended_columns = layer.out.columns(attended)
        gate_up = torch.empty(2 * width, n)
        self.gate_up_slices = layer.gate_up.slices(gate_up)
        self.gate, self.up = gate_up.t().split(width, 1)
        self.hidden = torch.empty(n, width)
        self.hidden_columns = layer.down.columns(self.hidden)


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
        self._spaces: dict[int, _Space] = {}

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
        space = self._space(len(tokens))
        space.x.copy_(F.embedding(tokens, self._embedding).t())
        turns = self._turns(positions, plan.rotation)
        transform = None if plan.rotation is None else plan.rotation.expand(self._kv_heads, -1, -1)
        plan.bind(*space.queries_keys_values)
        for i, layer in enumerate(self._layers):
            self._norm_into(space.normed, space.rows, layer.norm)
            self._project(layer, space, turns)
            attended = plan.attend_bound(i)
            if transform is not None:
                # As a batch: one product of a few rows would be shared by threads that cost more than it.
                attended = torch.bmm(attended.view(space.by_kv_head), transform).view(attended.shape)
            space.attended_by_head.copy_(attended)
            layer.out.add_product(space.x_out, space.attended_columns)
            self._norm_into(space.normed, space.rows, layer.mlp_norm)
            layer.gate_up.product_into(space.gate_up_slices, space.gate_up_columns)
            torch.mul(F.silu(space.gate, inplace=True), space.up, out=space.hidden)
            layer.down.add_product(space.x_down, space.hidden_columns)
        rows = F.rms_norm(space.rows[wanted], self._norm.shape, self._norm, self._eps)
        return self._head.product(rows).t().contiguous()

    def _project(self, layer: _Layer, space: _Space, turns: Tensor) -> None:
        """Queries, keys and values, with RoPE and transform, to where the plan takes them from."""
        layer.qkv.product_into(space.qkv_slices, space.qkv_columns)
        if layer.qkv_bias is not None:
            space.qkv.add_(layer.qkv_bias)
        if space.by_row is not space.qkv_rows:
            space.by_row.copy_(space.qkv_rows)
        if layer.head_norm is not None:
            space.normed_heads.copy_(F.rms_norm(space.normed_heads, (self._d,), None, self._eps) * layer.head_norm)
        torch.bmm(space.heads, turns, out=space.turned)

    def _norm_into(self, out: Tensor, rows: Tensor, weight: Tensor) -> None:
        scale = rows.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        torch.mul(rows, scale, out=out).mul_(weight)

    def _space(self, n: int) -> _Space:
        """Where `n` rows are computed: kept for the numbers of rows that come again and again."""
        space = self._spaces.get(n) or _Space(n, self._layers[0], self._heads, self._kv_heads, self._d)
        if n <= _KEPT_ROWS:
            self._spaces[n] = space
        return space

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
