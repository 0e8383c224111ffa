"""How much a repetition of a document's tokens looks at each of them: the scores of KVzip (Kim et al., 2025).

The repetition's rows attend to sinks, to the tokens in question and to themselves by the fused kernels that prefill
uses, which give each row's log-sum-exp. With it a token's probability is ``exp(scale * q.k - lse)``, so the largest one
needs no softmax: one more product of queries and keys, into which the log-sum-exp goes as two more dims, and a maximum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cache_store.layout import BLOCK_TOKENS
from service.engine.exl2_engine.backend import KVBackend
from service.engine.exl2_engine.export import Pace
from service.engine.exl2_engine.model import DecoderModel
from service.engine.exl2_engine.pool import Document
from service.engine.exl2_engine.projections import rotated_qkv

SCORES = 1 << 25
"""Scores at a time: 64 MiB in FP16."""
MORE_DIMS = 8
"""Dims behind a key's own: a row of FP16 stays a multiple of 16 bytes."""
_UNIT = 64.0
"""Value of the keys in these dims, so that a log-sum-exp divided by it does not leave FP16."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a repetition sees of a document: its tokens [0, sinks) and [first, last)."""

    sinks: int
    first: int
    last: int

    @classmethod
    def of(cls, document: Document, sinks: int, first: int, last: int) -> "Sight":
        """Raises ValueError unless sinks and tokens lie in the document, one behind the other."""
        if not 0 <= sinks <= first < last <= document.n_tokens:
            raise ValueError(f"{sinks} sinks and tokens {first} to {last} of a document of {document.n_tokens}")
        return cls(sinks, first, last)

    @property
    def n_tokens(self) -> int:
        return self.last - self.first


class SeenTokens:
    """Keys and values of what is seen of a document, one layer at a time, decoded."""

    def __init__(self, sight: Sight, document: Document, model: DecoderModel, backend: KVBackend) -> None:
        self._sight = sight
        self._backend = backend
        self._lead = sight.first % BLOCK_TOKENS
        self._at = max(sight.sinks, self._lead)
        # A copy begins where memory is aligned: kernels are compiled apart for a pointer that is not.
        self._blocks = document.blocks[sight.first // BLOCK_TOKENS : -(-sight.last // BLOCK_TOKENS)].clone()
        self._sink_blocks = document.blocks[: -(-sight.sinks // BLOCK_TOKENS)]
        shape = (model.n_kv_heads, self._at + sight.n_tokens, model.head_dim)
        self._k, self._v = (torch.empty(shape, dtype=model.dtype, device=model.device) for _ in range(2))
        self._keys = torch.zeros(
            (model.n_kv_heads, sight.n_tokens, model.head_dim + MORE_DIMS), dtype=model.dtype, device=model.device
        )
        self._keys[..., model.head_dim : model.head_dim + 2] = _UNIT

    def decode(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[n_kv_heads, sinks + n_tokens, head_dim]`` of a layer; overwritten by the next call."""
        sight, start = self._sight, self._at - self._lead
        # Blocks are decoded from their first token on; the sinks then cover what stands before `first`.
        n = self._lead + sight.n_tokens
        self._backend.decode(pool, self._blocks, n, self._k[:, start:], self._v[:, start:])
        start = self._at - sight.sinks
        if sight.sinks:
            k, v = self._k[:, start : self._at], self._v[:, start : self._at]
            self._backend.decode(pool, self._sink_blocks, sight.sinks, k, v)
        return self._k[:, start:], self._v[:, start:]

    def keys(self) -> Tensor:
        """Keys of the tokens in question in the layer decoded last, with the dims for the log-sum-exp:
        ``[n_kv_heads, n_tokens, head_dim + MORE_DIMS]``."""
        self._keys[..., : self._k.shape[2]] = self._k[:, self._at :]
        return self._keys


class Replay:
    """A repetition of `tokens` behind a document. `slice_rows`: rows computed at a time in a layer."""

    def __init__(self, model: DecoderModel, backend: KVBackend, sight: Sight, slice_rows: int) -> None:
        self._model = model
        self._backend = backend
        self._sight = sight
        self._slice_rows = slice_rows

    def __call__(
        self,
        pools: Sequence[Tensor],
        document: Document,
        ids: Tensor,
        between_layers: Callable[[], None] | None = None,
    ) -> Tensor:
        """The largest probabilities, FP32 ``[n_layers, n_kv_heads, n_tokens]`` on the CPU, of token ids int32 ``[n]``
        on the device."""
        model, pace = self._model, Pace(self._model.device)
        seen = SeenTokens(self._sight, document, model, self._backend)
        start = document.next_position
        positions = torch.arange(start, start + len(ids), dtype=torch.int32, device=model.device)
        x = model.embed(ids)
        shape = (model.n_layers, model.n_kv_heads, self._sight.n_tokens)
        found = torch.empty(shape, dtype=torch.float32, device=model.device)
        for layer, pool in enumerate(pools):
            found[layer] = self._layer(layer, x, positions, seen.decode(pool), seen.keys())
            if between_layers is not None:
                pace.layer_queued()
                between_layers()
        return found.mul_(model.scale).clamp_(max=0).exp_().cpu()

    def _layer(self, layer: int, x: Tensor, positions: Tensor, seen: tuple[Tensor, Tensor], keys: Tensor) -> Tensor:
        """Takes `x` through a layer, in place. Gives the largest log probabilities, divided by the scale of scores."""
        model, step = self._model, self._slice_rows
        before, best = [seen], torch.full(keys.shape[:2], -torch.inf, device=x.device)
        for at in range(0, len(x), step):
            rows = slice(at, at + step)
            q, k, v = rotated_qkv(model, self._backend, layer, x[rows], positions[rows])
            out, lse = self._backend.prefill_attention.over(q, k, v, before, model.scale)
            torch.maximum(best, largest(q, lse / model.scale, keys), out=best)
            if layer < model.n_layers - 1:
                x[rows] = model.mlp(layer, model.attention_out(layer, out, x[rows]))
            if at + step < len(x):
                before.append((k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()))
        return best


def largest(q: Tensor, lse: Tensor, keys: Tensor) -> Tensor:
    """The largest ``q.k - lse`` of each key over all rows and heads of its KV head, FP32 ``[n_kv_heads, n_tokens]``.

    `q`: ``[n, n_heads, head_dim]``; `lse`: FP32 ``[n_kv_heads, group, n]``, in units of ``q.k``; `keys`: see
    `SeenTokens.keys`.
    """
    kv_heads, n_tokens, width = keys.shape
    queries = torch.zeros((kv_heads, lse[0].numel(), width), dtype=keys.dtype, device=keys.device)
    by_head = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    queries.unflatten(1, lse.shape[1:])[..., : q.shape[2]] = by_head
    shift = lse.flatten(1) / -_UNIT
    # In two parts: FP16 alone would round a large log-sum-exp by more than probabilities of interest differ.
    queries[..., -MORE_DIMS] = shift
    queries[..., 1 - MORE_DIMS] = shift - queries[..., -MORE_DIMS].float()
    best: Tensor | None = None
    for part in queries.split(max(1, SCORES // (kv_heads * n_tokens)), 1):
        here = torch.bmm(keys, part.transpose(1, 2)).amax(-1)
        best = here if best is None else torch.maximum(best, here)
    assert best is not None
    return best.float()
