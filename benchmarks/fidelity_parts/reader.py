"""The demo model in plain FP32 torch over any rows of a document's KV: what the fidelity harness measures with.

transformers calls the attention below in each layer, as it calls the engine's own; the plan of a forward says what the
rows attend to. Every head may keep rows of its own, with a bias on each and values that were refitted.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging

from service.engine.models.card import CARD_NAME, ModelCard
from service.engine.prompt import PromptTemplate
from service.engine.tokenizer import Tokenizer

NAME = "preread-fidelity"


@dataclass(frozen=True, slots=True)
class KV:
    """Keys after RoPE and values of consecutive tokens: ``[layers, kv_heads, n, head_dim]`` each."""

    k: Tensor
    v: Tensor

    @property
    def n_tokens(self) -> int:
        return self.k.shape[2]


@dataclass(frozen=True, slots=True)
class Kept:
    """The rows that stay of a document, layer by layer.

    `rows`: places of the tokens, int64 ``[kv_heads, r]``. `bias`: added to the scores, ``[kv_heads, r]`` or None.
    `values`: refitted ones, ``[kv_heads, r, head_dim]``, or None for the document's own. `always`: tokens that every
    head of every layer keeps, bool ``[n]``. Rows of layers that need fewer are missing, not padded; a head that keeps
    fewer than the others of its layer has a bias of minus infinity on the surplus.
    """

    rows: list[Tensor]
    always: Tensor
    bias: list[Tensor] | None = None
    values: list[Tensor] | None = None

    @property
    def mean_rows(self) -> float:
        """Rows per head, over all layers and heads."""
        if self.bias is None:
            return sum(r.shape[1] for r in self.rows) / len(self.rows)
        return sum(float(torch.isfinite(b).sum()) / len(b) for b in self.bias) / len(self.bias)


class Plan(Protocol):
    """What the rows of a forward attend to. Queries ``[b, heads, m, d]``, keys and values ``[b, kv_heads, m, d]``."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor: ...


class Enough(Exception):
    """Raised out of a forward whose plan needs no deeper layer."""


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, scaling: float, plan: Plan, **_: Any
) -> tuple[Tensor, None]:
    return plan.attend(cast(int, module.layer_idx), query, key, value, scaling).transpose(1, 2), None


AttentionInterface.register(NAME, _attention)


@dataclass(slots=True)
class Prefill:
    """Rows that attend causally to themselves; their KV is kept."""

    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.k.append(k[0])
        self.v.append(v[0])
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


@dataclass(slots=True)
class Ask:
    """Questions behind the kept rows of a document, each with fetched tokens of its own.

    `fetched`: bool ``[b, n]`` or None; a token that is fetched is left out of the kept rows unless `twice`. `hear`:
    layers whose scaled queries are kept in `heard`; after the last of them the forward ends when `stop`.
    """

    document: KV
    kept: Kept
    fetched: Tensor | None = None
    twice: bool = False
    hear: tuple[int, ...] = ()
    stop: bool = False
    heard: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        b, heads, m, d = q.shape
        kv_heads = k.shape[1]
        grouped = (q * scale).reshape(b, kv_heads, heads // kv_heads, m, d)
        if layer in self.hear:
            self.heard[layer] = grouped
            if self.stop and layer == max(self.hear):
                raise Enough
        rows = self.kept.rows[layer]
        parts = [self._kept_part(layer, rows, grouped), self._own_part(grouped, k)]
        values = [self._kept_values(layer, rows).expand(b, -1, -1, -1), v]
        if self.fetched is not None:
            at, there = _padded(self.fetched)
            parts.append(self._fetched_part(layer, grouped, at, there))
            values.append(self.document.v[layer][:, at].transpose(0, 1))
        p = torch.cat(parts, -1).softmax(-1).split([part.shape[-1] for part in parts], -1)
        out = sum((torch.einsum("bhgmr,bhrd->bhgmd", x, y) for x, y in zip(p, values, strict=True)), torch.zeros(()))
        return out.reshape(b, heads, m, d)

    def _kept_part(self, layer: int, rows: Tensor, q: Tensor) -> Tensor:
        keys = _rows(self.document.k[layer], rows)
        scores = torch.einsum("bhgmd,hrd->bhgmr", q, keys)
        if self.kept.bias is not None:
            scores = scores + self.kept.bias[layer][:, None, None]
        if self.fetched is not None and not self.twice:
            again = self.fetched[:, rows]
            scores = scores.masked_fill(again[:, :, None, None], -torch.inf)
        return scores

    def _kept_values(self, layer: int, rows: Tensor) -> Tensor:
        return self.kept.values[layer] if self.kept.values is not None else _rows(self.document.v[layer], rows)

    @staticmethod
    def _own_part(q: Tensor, k: Tensor) -> Tensor:
        m = k.shape[2]
        causal = torch.ones(m, m, dtype=torch.bool, device=k.device).tril()
        return torch.einsum("bhgmd,bhrd->bhgmr", q, k).masked_fill(~causal, -torch.inf)

    def _fetched_part(self, layer: int, q: Tensor, at: Tensor, there: Tensor) -> Tensor:
        keys = self.document.k[layer][:, at].transpose(0, 1)
        scores = torch.einsum("bhgmd,bhrd->bhgmr", q, keys)
        return scores.masked_fill(~there[:, None, None, None], -torch.inf)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


def _padded(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the true entries of each row, as many as the fullest has, and which of them count."""
    most = int(chosen.sum(-1).max())
    there, at = chosen.int().sort(dim=-1, descending=True, stable=True)
    return at[:, :most], there[:, :most].bool()


@dataclass(slots=True)
class Replay:
    """Rows that attend to chosen tokens of a document and causally to themselves, and are looked at while they do:
    the largest probability each token gets from any row and query head goes to `scores`, ``[kv_heads, seen]`` per layer
    without the sinks, scaled queries go to `queries`. With the `output` projections a probability counts times the
    length of what the value adds to the residual stream (KVzip+, in NVIDIA's kvpress)."""

    document: KV
    seen: Tensor
    n_sinks: int
    output: list[Tensor] | None = None
    scores: list[Tensor] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        b, heads, m, d = q.shape
        kv_heads, n_seen = k.shape[1], len(self.seen)
        grouped = (q[0] * scale).reshape(kv_heads, -1, d)
        keys = torch.cat((self.document.k[layer][:, self.seen], k[0]), 1)
        values = torch.cat((self.document.v[layer][:, self.seen], v[0]), 1)
        scores = (grouped @ keys.transpose(1, 2)).view(kv_heads, -1, m, n_seen + m)
        later = torch.ones(m, m, dtype=torch.bool, device=q.device).triu(1)
        scores[..., n_seen:].masked_fill_(later, -torch.inf)
        p = scores.softmax(-1)
        self.queries.append(grouped.view(kv_heads, -1, m, d))
        self.scores.append(self._score(layer, p[..., self.n_sinks : n_seen], values[:, self.n_sinks : n_seen]))
        return (p.flatten(1, 2) @ values).reshape(b, heads, m, d)

    def _score(self, layer: int, p: Tensor, values: Tensor) -> Tensor:
        best = p.amax(2)
        if self.output is not None:
            weight = self.output[layer].view(self.output[layer].shape[0], *p.shape[:2], -1)
            length = torch.einsum("ohgd,hnd->hgno", weight, values).norm(dim=-1)
            best = best * length
        return best.amax(1)


class Reader:
    """A model directory's model, tokenizer and prompt."""

    def __init__(self, model_dir: Path, device: str) -> None:
        logging.disable_progress_bar()
        torch.set_float32_matmul_precision("highest")
        self.card = msgspec.json.decode((model_dir / CARD_NAME).read_bytes(), type=ModelCard)
        self.tokenizer = Tokenizer.load(model_dir)
        self.prompt = PromptTemplate(self.card.prompt, self.tokenizer)
        self.device = torch.device(device)
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation=NAME, local_files_only=True
        )
        self.model = model.eval().requires_grad_(False).to(self.device)

    def tensor(self, ids: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(ids, device=self.device)

    def hidden(self, ids: Tensor, first_position: int, plan: Plan) -> Tensor:
        """Last hidden states ``[b, m, hidden]`` of tokens ``[b, m]`` at consecutive positions."""
        positions = torch.arange(first_position, first_position + ids.shape[1], device=self.device)[None]
        return self.model.model(input_ids=ids, position_ids=positions, use_cache=False, plan=plan)[0]

    def prefill(self, ids: list[int]) -> KV:
        """KV of a document's tokens."""
        plan = Prefill()
        self.hidden(self.tensor([ids]), 0, plan)
        return KV(torch.stack(plan.k), torch.stack(plan.v))

    @property
    def output_weights(self) -> list[Tensor]:
        """Output projection of each layer, ``[hidden, heads * head_dim]``."""
        return [layer.self_attn.o_proj.weight for layer in self.model.model.layers]
