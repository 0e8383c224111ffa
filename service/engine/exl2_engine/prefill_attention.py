"""Attention of a document chunk over its quantized past and, causally, over itself.

The past is decoded a piece at a time into a scratch that all layers share, each piece is attended to by one of
torch's fused kernels, and the results are merged by their log-sum-exp. Over the past, the queries of one KV head are
rows of one matrix ``[group * n, head_dim]``, so that keys and values are never repeated.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cache_store.layout import BLOCK_TOKENS, KVLayout
from service.engine.exl2_engine import sdpa
from service.engine.exl2_engine.sdpa import Method

PIECE_TOKENS = 16384
"""Tokens of the past decoded at a time. Twice as many save two percent of the time at 128K."""

_LEAST_PIECE = 2048
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over a part of the keys: `out` ``[n_kv_heads, group, n, head_dim]`` of any strides, `lse` FP32
    ``[n_kv_heads, group, n]``."""

    out: Tensor
    lse: Tensor


class Merger(Protocol):
    """Combines results over disjoint keys."""

    def merge(self, a: Partial, b: Partial) -> Partial:
        """Both as one, in FP32. May overwrite `a` when that is FP32."""
        ...

    def finish(self, a: Partial, b: Partial | None, dtype: torch.dtype) -> Tensor:
        """The last merge, the codec's transform undone, as ``[n, n_heads, head_dim]`` in `dtype`."""
        ...


Decode = Callable[[Tensor, Tensor, int, Tensor, Tensor], None]


class PrefillAttention:
    """See the module. Holds the scratch, so one per device and no two calls at a time."""

    def __init__(self, layout: KVLayout, decode: Decode, merger: Merger, method: Method | None = None) -> None:
        """`decode` is `KVBackend.decode`. `method` forces one of torch's kernels; by default the best that works."""
        self.layout, self.decode, self.merger, self.method = layout, decode, merger, method
        self._scratch: Tensor | None = None

    def scratch_nbytes(self, n_heads: int, n: int, n_past: int, itemsize: int = 2) -> int:
        """Device bytes that a call takes beside its arguments and result, at most: for the memory plan."""
        kv = 2 * self.layout.n_kv_heads * min(PIECE_TOKENS, n_past) * self.layout.head_dim * itemsize
        rows = n_heads * n * (self.layout.head_dim + 1)
        # Transposed queries, two partial results, the merged one in FP32, repeated keys and values of the chunk.
        return kv + rows * (5 * itemsize + 4)

    def warm_up(self, n_heads: int, n: int, device: torch.device | str, dtype: torch.dtype = torch.float16) -> None:
        """Attend once to pieces of every length with chunks of `n` tokens, so that kernels are compiled and cuDNN's
        plans made before a document waits for them."""
        layout, n_past = self.layout, 2 * PIECE_TOKENS - _LEAST_PIECE
        pool = torch.zeros(1, layout.record_nbytes(BLOCK_TOKENS), dtype=torch.uint8, device=device)
        blocks = torch.zeros(layout.n_blocks(n_past), dtype=torch.int32, device=device)
        q, kv = (torch.zeros(n, h, layout.head_dim, dtype=dtype, device=device) for h in (n_heads, layout.n_kv_heads))
        self(q, kv, kv, pool, blocks, n_past, 1.0)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, blocks: Tensor, n_past: int, scale: float
    ) -> Tensor:
        """As `KVBackend.prefill`."""
        method = self._method(q)
        heads_first = q.transpose(0, 1).contiguous()
        merged = own(method, heads_first, k, v, scale)
        waiting: Partial | None = None
        for first, length in _pieces(n_past):
            if waiting is not None:
                merged = self.merger.merge(merged, waiting)
            past_k, past_v = self._decoded(pool, blocks, first, length, q)
            waiting = past(method, heads_first, past_k, past_v, scale)
        return self.merger.finish(merged, waiting, q.dtype)

    def over(
        self, q: Tensor, k: Tensor, v: Tensor, before: Sequence[tuple[Tensor, Tensor]], scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of rows as in `__call__` to their own keys and values and to all of the decoded ones `before`, each
        ``[n_kv_heads, tokens, head_dim]``. Gives the output of `__call__` and the log-sum-exp of all scores, FP32
        ``[n_kv_heads, group, n]``."""
        method = Method.FLASH if self._method(q) is Method.CUDNN else self._method(q)  # lengths vary: see `_for_shape`
        heads_first = q.transpose(0, 1).contiguous()
        merged = own(method, heads_first, k, v, scale)
        waiting: Partial | None = None
        for past_k, past_v in before:
            if waiting is not None:
                merged = self.merger.merge(merged, waiting)
            waiting = past(method, heads_first, past_k, past_v, scale)
        lse = merged.lse if waiting is None else torch.logaddexp(merged.lse, waiting.lse)
        return self.merger.finish(merged, waiting, q.dtype), lse

    def _method(self, q: Tensor) -> Method:
        return self.method or sdpa.best(q.device, q.dtype, q.shape[2])

    def _decoded(self, pool: Tensor, blocks: Tensor, first: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        shape = (2, self.layout.n_kv_heads, length, self.layout.head_dim)
        size = torch.Size(shape).numel()
        held = self._scratch
        if held is None or held.numel() < size or held.dtype != like.dtype or held.device != like.device:
            self._scratch = held = None  # frees the smaller one first
            # Made in inference mode it could not be written to outside of it, and callers may do both.
            with torch.inference_mode(False):
                self._scratch = held = torch.empty(size, dtype=like.dtype, device=like.device)
        k, v = held[:size].view(shape)
        end = -(-(first + length) // BLOCK_TOKENS)
        self.decode(pool, blocks[first // BLOCK_TOKENS : end], length, k, v)
        return k, v


def _pieces(n_past: int) -> Iterator[tuple[int, int]]:
    """(first token, tokens) of each piece. Few different lengths, because cuDNN makes a plan for every new one:
    powers of two, and a rest only where chunks are no multiple of 2,048 tokens."""
    first = 0
    while first < n_past:
        rest = n_past - first
        length = min(PIECE_TOKENS, 1 << rest.bit_length() - 1) if rest >= _LEAST_PIECE else rest
        yield first, length
        first += length


def own(method: Method, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
    """Causal attention of queries ``[heads, n, d]`` to the chunk's own keys and values ``[n, kv_heads, d]``."""
    heads, n, _ = q.shape
    kv_heads = k.shape[1]
    all_k, all_v = (x.transpose(0, 1).repeat_interleave(heads // kv_heads, 0) for x in (k, v))
    out, lse = sdpa.attend(_for_shape(method, n), q, all_k, all_v, scale, causal=True)
    return Partial(out.unflatten(0, (kv_heads, -1)), lse.unflatten(0, (kv_heads, -1)))


def past(method: Method, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
    """Attention of queries ``[heads, n, d]`` to all of the keys and values ``[kv_heads, tokens, d]``."""
    heads, n, d = q.shape
    kv_heads = k.shape[0]
    rows = q.view(kv_heads, heads // kv_heads * n, d)
    method = _for_shape(method, n) if k.shape[1] >= _LEAST_PIECE else _for_shape(method, 0)
    out, lse = sdpa.attend(method, rows, k, v, scale, causal=False)
    return Partial(out.unflatten(1, (-1, n)), lse.unflatten(1, (-1, n)))


def _for_shape(method: Method, n: int) -> Method:
    """cuDNN only for whole chunks: the odd ones, each a new shape, cost more in planning than they gain."""
    return Method.FLASH if method is Method.CUDNN and (n % _ROWS or not n) else method
