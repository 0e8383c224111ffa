"""A few rows' products with one document's keys and values, in the two layouts a layer may have (`DocumentKV.turn`).

Both cut their work so that all threads have some: the batched product behind them gives each thread whole products.
Both read and write parts of the ``[kv_heads, rows, width]`` scores and probabilities that `FewRows` keeps; the scratch
memory between holds nothing from one call to the next.
"""

from typing import Protocol

import torch
from torch import Tensor

from service.engine.torch_engine.kv import DocumentKV
from service.engine.torch_engine.scratch import Scratch

_PARTS = 4
_PIECES = (1, 2, 4)


class Products(Protocol):
    """`score` writes the scores of scaled queries ``[kv_heads, rows, d]``; `weigh` writes the values weighted by the
    probabilities to FP32 ``[kv_heads, rows, d]``."""

    def score(self, layer: int, rows: Tensor) -> None: ...

    def weigh(self, layer: int, out: Tensor) -> None: ...


class TokenProducts:
    """With layers as they are filled, ``[kv_heads, capacity, d]``: the tokens are cut into parts."""

    def __init__(self, document: DocumentKV, scores: Tensor, p: Tensor, scratch: Scratch) -> None:
        kv_heads, rows, width = scores.shape
        k, v = document.stored
        n_layers, _, capacity, d = k.shape
        parts = 1 if kv_heads % _PARTS == 0 else _PARTS
        by_part, batch = (kv_heads, parts, rows, capacity // parts), kv_heads * parts
        strides = (rows * width, capacity // parts, width, 1)
        self._scores, self._p = scores.as_strided(by_part, strides), p.as_strided(by_part, strides)
        cut = (n_layers, batch, capacity // parts, d)
        self._keys, self._values = k.view(cut).transpose(2, 3).unbind(), v.view(cut).unbind()
        self._products = scratch.take("products", (batch, rows, capacity // parts), k.dtype, k.device)
        same = k.dtype is v.dtype
        self._weights = self._products if same else scratch.take("weights", self._products.shape, v.dtype, v.device)

    def score(self, layer: int, rows: Tensor) -> None:
        _, parts, n, _ = self._scores.shape
        repeated = rows if parts == 1 else rows[:, None].expand(-1, parts, -1, -1).reshape(-1, n, rows.shape[-1])
        torch.bmm(repeated, self._keys[layer], out=self._products)
        self._scores.copy_(self._products.view(self._scores.shape))

    def weigh(self, layer: int, out: Tensor) -> None:
        self._weights.view(self._p.shape).copy_(self._p)
        parts = torch.bmm(self._weights, self._values[layer])
        torch.sum(parts.view(*self._p.shape[:3], -1), 1, dtype=torch.float32, out=out)


class FeatureProducts:
    """With turned layers, ``[kv_heads, d, capacity]``, in FP32: the features are cut into pieces."""

    def __init__(self, document: DocumentKV, scores: Tensor, p: Tensor, scratch: Scratch) -> None:
        kv_heads, rows, _ = scores.shape
        capacity, n = document.capacity, pieces(kv_heads, torch.get_num_threads())
        turned = [document.turned(layer) for layer in range(document.n_turned)]
        batch, d = kv_heads * n, turned[0][0].shape[1]
        cut = (batch, d // n, capacity)
        self._keys, self._values = [k.view(cut) for k, _ in turned], [v.view(cut).transpose(1, 2) for _, v in turned]
        self._scores, self._p = scores[..., :capacity], p[:, None, :, :capacity]
        self._products = scratch.take("products", (batch, rows, capacity), torch.float32, scores.device)
        self._by_piece = self._products.view(kv_heads, n, rows, capacity)
        self._pieces = list(self._by_piece.unbind(1))
        # Small ones, filled anew in every layer: queries cut into pieces, and what comes out by piece.
        self._rows, self._out = (torch.empty(kv_heads, n, rows, d // n, device=scores.device) for _ in range(2))
        self._rows_flat, self._out_flat = (x.view(batch, rows, d // n) for x in (self._rows, self._out))

    def score(self, layer: int, rows: Tensor) -> None:
        kv_heads, n, size, _ = self._rows.shape
        self._rows.copy_(rows.view(kv_heads, size, n, -1).transpose(1, 2))
        torch.bmm(self._rows_flat, self._keys[layer], out=self._products)
        if len(self._pieces) == 2:
            torch.add(*self._pieces, out=self._scores)
        else:
            self._scores.copy_(self._by_piece.sum(1) if len(self._pieces) > 1 else self._pieces[0])

    def weigh(self, layer: int, out: Tensor) -> None:
        self._by_piece.copy_(self._p)
        torch.bmm(self._products, self._values[layer], out=self._out_flat)
        kv_heads, n, size, _ = self._out.shape
        out.view(kv_heads, size, n, -1).copy_(self._out.transpose(1, 2))


def pieces(kv_heads: int, threads: int) -> int:
    """Into how many pieces the features are cut: the fewest that give every thread as much as the others."""
    return next((n for n in _PIECES if kv_heads * n % threads == 0), _PIECES[-1])
