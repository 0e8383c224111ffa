"""Attention of a few rows of one document: made once a step, then called in every layer.

One softmax runs over document and tail scores side by side: fewer operations than merging two results. The document is
cut into parts so that all threads work. Everything that is the same in every layer, the views of keys and values and
the memory for the scores, is made when the step begins: at one row a sequence, what surrounds the products would
otherwise take as long as the products.
"""

import torch
from torch import Tensor

from service.engine.torch_engine.attention import by_kv_head
from service.engine.torch_engine.kv import DocumentKV, Tail
from service.engine.torch_engine.scratch import Scratch

FEW_ROWS = 8
"""Up to this many rows on a document are attended to by plain products, which beat the flash kernel there."""

_PARTS = 4


class TailRows:
    """Views of the tail of one sequence, per layer: where its new rows go, and what its rows attend to."""

    __slots__ = ("keys", "new_keys", "new_values", "values")

    def __init__(self, tail: Tail, n_new: int) -> None:
        end = tail.length + n_new
        self.new_keys, self.new_values = (x[:, :, tail.length : end].unbind() for x in (tail.k, tail.v))
        self.keys, self.values = (x[:, :, :end].unbind() for x in (tail.k, tail.v))

    @property
    def length(self) -> int:
        return self.keys[0].shape[1]


class Share:
    """The rows ``[first, first + n)`` of a document's rows that belong to one sequence; `mask` as of `causal_mask`."""

    __slots__ = ("first", "mask", "n", "tail")

    def __init__(self, tail: TailRows, first: int, n: int, mask: Tensor | None) -> None:
        self.tail, self.first, self.n, self.mask = tail, first, n, mask


class FewRows:
    """A step's rows on one document. `heads` query heads and `kv_heads`, both of the document's head dim."""

    def __init__(self, document: DocumentKV, shares: list[Share], heads: int, kv_heads: int, scratch: Scratch) -> None:
        self._shares = shares
        self._n_rows = sum(share.n for share in shares)
        self._heads = (kv_heads, heads // kv_heads)
        self._parts = 1 if kv_heads % _PARTS == 0 else _PARTS
        n_layers, _, capacity, d = document.k.shape
        cut = (n_layers, kv_heads * self._parts, capacity // self._parts, d)
        self._keys = document.k.view(cut).transpose(2, 3).unbind()
        self._values = document.v.view(cut).unbind()
        self._take(document, capacity, d, scratch)

    def _take(self, document: DocumentKV, capacity: int, d: int, scratch: Scratch) -> None:
        """Memory for scores, ``[kv_heads * parts, rows, tokens]`` as products give them, and side by side with those of
        the tails, ``[kv_heads, rows, width]``."""
        (kv_heads, group), parts = self._heads, self._parts
        rows, device, exact = group * self._n_rows, document.k.device, torch.float32
        width = capacity + max(share.tail.length for share in self._shares)
        by_part = (kv_heads * parts, rows, capacity // parts)
        self._scores = scratch.take("scores", by_part, document.k.dtype, device)
        self._weights = scratch.take("weights", by_part, document.v.dtype, device)
        self._out = scratch.take("out", (kv_heads * parts, rows, d), document.v.dtype, device)
        self._side = scratch.take("side", (kv_heads, rows, width), exact, device)
        self._p = scratch.take("p", (kv_heads, rows, width), exact, device)
        strides = ((kv_heads, parts, rows, capacity // parts), (rows * width, capacity // parts, width, 1))
        self._side_by_part = self._side.as_strided(*strides)
        self._p_by_part = self._p.as_strided(*strides)
        # The columns of a tail that is not the longest, and those of the other sequences' rows, stay hidden.
        self._side[..., capacity:] = -torch.inf
        unused = self._side[..., document.n_tokens : capacity]
        self._unused = unused if unused.numel() else None
        self._side_of = [self._columns(self._side, share, capacity) for share in self._shares]
        self._p_of = [self._columns(self._p, share, capacity) for share in self._shares]

    def _columns(self, x: Tensor, share: Share, capacity: int) -> Tensor:
        """The rows and tail columns of one sequence: ``[kv_heads, group, n, tail]``, a view."""
        own = x.view(*self._heads, self._n_rows, -1)[:, :, share.first : share.first + share.n]
        return own[..., capacity : capacity + share.tail.length]

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Scaled queries ``[heads, n, d]`` in, output FP32 ``[heads, n, d]``; the tails hold the new rows already."""
        heads, _, d = q.shape
        rows = by_kv_head(q, self._heads[0])
        self._score(layer, rows)
        torch.softmax(self._side, -1, out=self._p)
        return self._weigh(layer, d).view(heads, self._n_rows, d)

    def _score(self, layer: int, rows: Tensor) -> None:
        kv_heads, n, d = rows.shape
        parts = self._parts
        repeated = rows if parts == 1 else rows[:, None].expand(-1, parts, -1, -1).reshape(kv_heads * parts, n, d)
        torch.bmm(repeated, self._keys[layer], out=self._scores)
        self._side_by_part.copy_(self._scores.view(kv_heads, parts, n, -1))
        if self._unused is not None:
            self._unused.fill_(-torch.inf)
        grouped = rows.view(*self._heads, self._n_rows, d)
        for share, side in zip(self._shares, self._side_of, strict=True):
            own = grouped[:, :, share.first : share.first + share.n].reshape(kv_heads, -1, d)
            part = torch.bmm(own, share.tail.keys[layer].transpose(1, 2)).view(side.shape)
            if share.mask is None:
                side.copy_(part)
            else:
                torch.add(part, share.mask, out=side)

    def _weigh(self, layer: int, d: int) -> Tensor:
        """Values weighted by the probabilities: ``[kv_heads, group * n, d]``."""
        kv_heads, group = self._heads
        self._weights.view(self._p_by_part.shape).copy_(self._p_by_part)
        torch.bmm(self._weights, self._values[layer], out=self._out)
        out = self._out.view(kv_heads, self._parts, -1, d).sum(1, dtype=torch.float32)
        by_row = out.view(kv_heads, group, self._n_rows, d)
        for share, p in zip(self._shares, self._p_of, strict=True):
            # From no elements torch cannot infer a size: a probe that only re-feeds the last token has no tail.
            own = p.reshape(kv_heads, group * share.n, share.tail.length)
            values = share.tail.values[layer]
            part = torch.bmm(own.to(values.dtype), values).view(kv_heads, group, share.n, d)
            by_row[:, :, share.first : share.first + share.n] += part
        return out
