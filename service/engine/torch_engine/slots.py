"""Summary slots in memory: rows of a document that every head of every layer has for itself.

Beside the rows that all heads share, a head has as many more as its share of the document's attention earned it: keys
and values of head after head in one flat tensor each. Both are of the keys' type: each head's number of rows is another
one, and in BF16 each would have the CPU library compile and keep a product.
"""

import torch
from torch import Tensor

from cache_store.codec import decode_records
from cache_store.slots import Counts, slot_layout, stored_rows
from service.engine.torch_engine.attention import flash
from service.engine.torch_engine.kv import DocumentKV, KVMemory


class SlotRows:
    """Slots of a document: `counts` of them, ``[n_layers][n_kv_heads]``.

    `keys` and `values`: of each layer and head a view ``[n, head_dim]``.
    """

    __slots__ = ("_flat", "_layout", "counts", "keys", "most", "values")

    def __init__(self, memory: KVMemory, counts: Counts) -> None:
        """Raises ValueError for counts that are not the model's."""
        layout = memory.layout
        if len(counts) != layout.n_layers or any(len(of_layer) != layout.n_kv_heads for of_layer in counts):
            raise ValueError(f"slots are counted for {layout.n_layers} layers of {layout.n_kv_heads} heads")
        sizes = [n for of_layer in counts for n in of_layer]
        if min(sizes) < 0:
            raise ValueError("a head has no negative number of slots")
        self.counts = [list(of_layer) for of_layer in counts]
        self.most = max(sizes)
        """Of the head that has most."""
        self._layout = slot_layout(layout)
        self._flat = torch.empty(2, sum(sizes), layout.head_dim, dtype=memory.key_dtype, device=memory.device)
        heads = layout.n_kv_heads
        parts = [x.split(sizes) for x in self._flat]
        self.keys, self.values = ([x[i : i + heads] for i in range(0, len(sizes), heads)] for x in parts)

    @property
    def nbytes(self) -> int:
        return self._flat.nbytes

    def load(self, layer: int, records: Tensor, *, rotated: bool) -> None:
        """Put the records of a layer's heads, uint8 as `cache_store.slots` says, into place. Raises ValueError when
        they are not as long as the counts say."""
        n_rows = sum(stored_rows(n) for n in self.counts[layer])
        shape = (1, n_rows, self._layout.head_dim)
        k, v = (torch.empty(shape, dtype=self._flat.dtype, device=self._flat.device) for _ in range(2))
        decode_records(records, n_rows, self._layout, out_k=k, out_v=v, rotated=rotated)
        at = 0
        for own_k, own_v in zip(self.keys[layer], self.values[layer], strict=True):
            own_k.copy_(k[0, at : at + len(own_k)])
            own_v.copy_(v[0, at : at + len(own_v)])
            at += stored_rows(len(own_k))

    def attend(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Output FP32 ``[kv_heads, rows, d]`` and log-sum-exp ``[kv_heads, rows]`` of many rows of scaled queries."""
        out, lse = torch.zeros_like(q, dtype=torch.float32), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        for head, (k, v) in enumerate(zip(self.keys[layer], self.values[layer], strict=True)):
            if len(k):
                out[head], lse[head] = (x[0] for x in flash(q[head : head + 1], k[None], v[None], 1.0))
        return out, lse


class SlotProducts:
    """A few rows' products with slots, one for each head, since each has another number of them. `scores` and `p`:
    parts ``[kv_heads, rows, most]`` of what `FewRows` keeps."""

    def __init__(self, slots: SlotRows, scores: Tensor, p: Tensor) -> None:
        self._slots, self._scores, self._p = slots, scores, p

    def score(self, layer: int, rows: Tensor) -> None:
        """Write the scores of scaled queries ``[kv_heads, rows, d]``."""
        self._scores.fill_(-torch.inf)  # a head has fewer than the one with most, and had others a layer ago
        for own, q, k in zip(self._scores, rows, self._slots.keys[layer], strict=True):
            if len(k):
                torch.mm(q, k.t(), out=own[:, : len(k)])

    def add(self, layer: int, out: Tensor) -> None:
        """Add the values, weighted, to FP32 ``[kv_heads, rows, d]``."""
        for own, p, v in zip(out, self._p, self._slots.values[layer], strict=True):
            if len(v):
                own.addmm_(p[:, : len(v)], v)


def n_slot_columns(document: DocumentKV) -> int:
    """Columns that the scores of the slots take: as many as the head with most has."""
    return 0 if document.slots is None else document.slots.most


def slots_nbytes(memory: KVMemory, n_rows: int) -> int:
    """Bytes of `n_rows` slots, those of all heads of all layers together."""
    return 2 * n_rows * memory.layout.head_dim * memory.key_dtype.itemsize
