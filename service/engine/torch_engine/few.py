"""Attention of a few rows of one document: made once a step, then called in every layer.

One softmax runs over the scores of document, slots and tails side by side: fewer operations than merging results.
Everything that is the same in every layer, the views of keys and values and the memory for the scores, is made when the
step begins: at one row a sequence, what surrounds the products would otherwise take as long as the products.
"""

import torch
from torch import Tensor

from service.engine.torch_engine.kv import DocumentKV, Tail
from service.engine.torch_engine.products import FeatureProducts, TokenProducts
from service.engine.torch_engine.scratch import Scratch
from service.engine.torch_engine.slots import SlotProducts, n_slot_columns

_FEW_ROWS = 8
_FEW_ROWS_FP32 = 24
_MOST_SCORES = 1 << 22  # of more than `_FEW_ROWS` rows: four buffers of 16 MiB

TURNED_A_STEP = 2
"""Layers of a document that a step of single rows turns: all of them within 15 steps on the demo model, each paying for
itself within nine."""


def few_rows(document: DocumentKV, n_rows: int, heads: int) -> bool:
    """Whether rows on a document are attended to by `FewRows`: no slower than the flash kernel up to there."""
    scores = n_rows * heads * (document.capacity + n_slot_columns(document))
    return n_rows <= _FEW_ROWS or (document.can_turn and n_rows <= _FEW_ROWS_FP32 and scores <= _MOST_SCORES)


class TailRows:
    """Views of the tail of one sequence, per layer: where its new rows go, and what its rows attend to."""

    __slots__ = ("keys", "keys_turned", "new_keys", "new_values", "values")

    def __init__(self, tail: Tail, n_new: int) -> None:
        end = tail.length + n_new
        self.new_keys, self.new_values = (x[:, :, tail.length : end].unbind() for x in (tail.k, tail.v))
        self.keys, self.values = (x[:, :, :end].unbind() for x in (tail.k, tail.v))
        self.keys_turned = tail.k[:, :, :end].transpose(2, 3).unbind()

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
        self._n_rows = sum(share.n for share in shares)
        if document.can_turn and self._n_rows == len(shares):
            document.turn(TURNED_A_STEP)
        self._n_turned = document.n_turned
        self._heads = (kv_heads, heads // kv_heads)
        shape = (kv_heads, heads // kv_heads * self._n_rows, document.memory.layout.head_dim)
        self._rows, self._out = (torch.empty(shape, device=document.memory.device) for _ in range(2))
        self._by_head, self._result = (x.view(heads, self._n_rows, shape[2]) for x in (self._rows, self._out))
        self._take(document, shares, scratch)
        both = (document, self._side, self._p, scratch)
        self._turned = FeatureProducts(*both) if self._n_turned else None
        self._plain = TokenProducts(*both) if self._n_turned < document.memory.layout.n_layers else None
        columns = slice(document.capacity, document.capacity + n_slot_columns(document))
        parts = self._side[..., columns], self._p[..., columns]
        self._slots = None if document.slots is None else SlotProducts(document.slots, *parts)

    def _take(self, document: DocumentKV, shares: list[Share], scratch: Scratch) -> None:
        """Memory for scores and probabilities, ``[kv_heads, rows, width]``: the document's, those of the slots, then
        those of the tails."""
        (kv_heads, group), capacity = self._heads, document.capacity
        end = capacity + n_slot_columns(document)
        width = end + max(share.tail.length for share in shares)
        shape, device = (kv_heads, group * self._n_rows, width), document.memory.device
        self._side = scratch.take("side", shape, torch.float32, device)
        self._p = scratch.take("p", shape, torch.float32, device)
        # The columns of a tail that is not the longest, and those of the other sequences' rows. Hidden in every layer:
        # in between, other groups of the same step compute in this memory.
        self._hidden = self._side[..., end:] if len(shares) > 1 else None
        unused = self._side[..., document.n_tokens : capacity]
        self._unused = unused if unused.numel() else None
        each = (x.view(kv_heads, group, self._n_rows, -1) for x in (self._rows, self._out, self._side, self._p))
        rows, out, side, p = each
        self._tails = [_Tail(share, rows, out, side, p, end) for share in shares]

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Scaled queries ``[heads, n, d]`` in, output FP32 ``[heads, n, d]``; the tails hold the new rows already.

        The output is overwritten by the next call.
        """
        products = self._turned if layer < self._n_turned else self._plain
        assert products is not None
        self._by_head.copy_(q)
        products.score(layer, self._rows)
        if self._unused is not None:
            self._unused.fill_(-torch.inf)
        if self._hidden is not None:
            self._hidden.fill_(-torch.inf)
        if self._slots is not None:
            self._slots.score(layer, self._rows)
        for tail in self._tails:
            tail.score(layer)
        torch.softmax(self._side, -1, out=self._p)
        products.weigh(layer, self._out)
        if self._slots is not None:
            self._slots.add(layer, self._out)
        for tail in self._tails:
            tail.add_values(layer)
        return self._result


class _Tail:
    """One sequence's rows and its tail. `rows`, `out`, `side` and `p` are ``[kv_heads, group, all rows, ...]``."""

    def __init__(self, share: Share, rows: Tensor, out: Tensor, side: Tensor, p: Tensor, first: int) -> None:
        self._rows = share.tail
        self._mask = share.mask
        own = slice(share.first, share.first + share.n)
        columns = slice(first, first + share.tail.length)
        # One row of a sequence is a matrix over its heads as it lies, several are copied together.
        self._single = share.n == 1
        self._q, self._out = (x[:, :, own] for x in (rows, out))
        self._side, self._p = (x[:, :, own, columns] for x in (side, p))
        if self._single:
            self._q, self._out, self._side, self._p = (x[:, :, 0] for x in (self._q, self._out, self._side, self._p))
        # From no elements torch cannot infer a size: a probe that only re-feeds the last token has no tail.
        self._size = (out.shape[0], out.shape[1] * share.n)

    def score(self, layer: int) -> None:
        q = self._q if self._single else self._q.reshape(*self._size, self._q.shape[-1])
        part = torch.bmm(q, self._rows.keys_turned[layer])
        if not self._single:
            part = part.view(self._side.shape)
        if self._mask is None:
            self._side.copy_(part)
        else:
            torch.add(part, self._mask, out=self._side)

    def add_values(self, layer: int) -> None:
        values = self._rows.values[layer]
        p = self._p if self._single else self._p.reshape(*self._size, self._p.shape[-1])
        part = torch.bmm(p.to(values.dtype), values)
        self._out.add_(part if self._single else part.view(self._out.shape))
