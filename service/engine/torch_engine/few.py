"""Attention of a few rows of one document: made once a step, then called in every layer.

One softmax runs over document and tail scores side by side: fewer operations than merging two results. Everything that
is the same in every layer, the views of keys and values and the memory for the scores, is made when the step begins: at
one row a sequence, what surrounds the products would otherwise take as long as the products.
"""

import torch
from torch import Tensor

from service.engine.torch_engine.attention import by_kv_head
from service.engine.torch_engine.kv import DocumentKV, Tail
from service.engine.torch_engine.products import FeatureProducts, TokenProducts
from service.engine.torch_engine.scratch import Scratch

_FEW_ROWS = 8
_FEW_ROWS_FP32 = 24
_MOST_SCORES = 1 << 22  # of more than `_FEW_ROWS` rows: four buffers of 16 MiB

TURNED_A_STEP = 2
"""Layers of a document that a step of single rows turns: all of them within 15 steps on the demo model, each paying for
itself within nine."""


def few_rows(document: DocumentKV, n_rows: int, heads: int) -> bool:
    """Whether rows on a document are attended to by `FewRows`: no slower than the flash kernel up to there."""
    scores = n_rows * heads * document.capacity
    return n_rows <= _FEW_ROWS or (document.can_turn and n_rows <= _FEW_ROWS_FP32 and scores <= _MOST_SCORES)


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
        if document.can_turn and self._n_rows == len(shares):
            document.turn(TURNED_A_STEP)
        self._n_turned = document.n_turned
        self._take(document, scratch)
        both = (document, self._side, self._p, scratch)
        self._turned = FeatureProducts(*both) if self._n_turned else None
        self._plain = TokenProducts(*both) if self._n_turned < document.memory.layout.n_layers else None

    def _take(self, document: DocumentKV, scratch: Scratch) -> None:
        """Memory for scores and probabilities, ``[kv_heads, rows, width]``: the document's, then those of the tails."""
        (kv_heads, group), capacity = self._heads, document.capacity
        width = capacity + max(share.tail.length for share in self._shares)
        shape, device = (kv_heads, group * self._n_rows, width), document.memory.device
        self._side = scratch.take("side", shape, torch.float32, device)
        self._p = scratch.take("p", shape, torch.float32, device)
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
        products = self._turned if layer < self._n_turned else self._plain
        assert products is not None
        rows = by_kv_head(q, self._heads[0])
        products.score(layer, rows)
        if self._unused is not None:
            self._unused.fill_(-torch.inf)
        self._score_tails(layer, rows)
        torch.softmax(self._side, -1, out=self._p)
        out = products.weigh(layer)
        self._add_tails(layer, out)
        return out.view(heads, self._n_rows, d)

    def _score_tails(self, layer: int, rows: Tensor) -> None:
        kv_heads, _, d = rows.shape
        grouped = rows.view(*self._heads, self._n_rows, d)
        for share, side in zip(self._shares, self._side_of, strict=True):
            own = grouped[:, :, share.first : share.first + share.n].reshape(kv_heads, -1, d)
            part = torch.bmm(own, share.tail.keys[layer].transpose(1, 2)).view(side.shape)
            if share.mask is None:
                side.copy_(part)
            else:
                torch.add(part, share.mask, out=side)

    def _add_tails(self, layer: int, out: Tensor) -> None:
        """Add the tails' values, weighted, to ``[kv_heads, group * n, d]``."""
        kv_heads, group = self._heads
        by_row = out.view(kv_heads, group, self._n_rows, -1)
        for share, p in zip(self._shares, self._p_of, strict=True):
            # From no elements torch cannot infer a size: a probe that only re-feeds the last token has no tail.
            own = p.reshape(kv_heads, group * share.n, share.tail.length)
            values = share.tail.values[layer]
            part = torch.bmm(own.to(values.dtype), values).view(kv_heads, group, share.n, -1)
            by_row[:, :, share.first : share.first + share.n] += part
