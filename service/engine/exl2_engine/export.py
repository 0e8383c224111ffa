"""Encoded blocks on their way from the card to the host, copied beside the computing.

Each layer's blocks are gathered on the computing stream, which makes them independent of the pool, then copied to
page-locked memory on a stream of their own. Without a card it is a plain copy.
"""

import torch
from torch import Tensor

from cache_store.layout import KVLayout
from service.engine.exl2_engine.records import any_bad, pack_partial


class Export:
    """The records of one chunk or tail: `n_tokens` tokens from a block's first on, in every layer."""

    def __init__(
        self, layout: KVLayout, n_tokens: int, device: torch.device, stream: "torch.cuda.Stream | None" = None
    ) -> None:
        self._layout = layout
        self._lengths = layout.block_lengths(n_tokens)
        self._stream = stream
        shape = (layout.n_layers, len(self._lengths), layout.record_nbytes(layout.block_tokens))
        self._host = torch.empty(shape, dtype=torch.uint8, pin_memory=stream is not None)
        self._bad = torch.zeros((), dtype=torch.bool, device=device)

    def add(self, layer: int, pool: Tensor, blocks: Tensor) -> None:
        """Start copying a layer's blocks, as all work queued so far leaves them."""
        staged = pool.index_select(0, blocks)
        self._bad = self._bad | any_bad(staged, self._layout)
        if self._stream is None:
            self._host[layer].copy_(staged)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._host[layer].copy_(staged, non_blocking=True)
        staged.record_stream(self._stream)

    def finish(self) -> list[list[memoryview]]:
        """Wait for all copies; the records as ``[block][layer]``.

        Raises ValueError when one of them holds NaN, infinity or values beyond the range of its type.
        """
        if self._stream is not None:
            self._stream.synchronize()
        if bool(self._bad):
            raise ValueError("KV holds NaN, infinity or values beyond the range of its type")
        return [[self._record(layer, i, n) for layer in range(len(self._host))] for i, n in enumerate(self._lengths)]

    def _record(self, layer: int, block: int, n_tokens: int) -> memoryview:
        whole = self._host[layer, block]
        packed = whole if n_tokens == self._layout.block_tokens else pack_partial(whole, n_tokens, self._layout)
        return packed.numpy().data


class Pace:
    """Keeps the host at most one layer ahead of the card, so that other work slips in with a short wait."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event() for _ in range(2)] if device.type == "cuda" else []
        self._n = 0

    def layer_queued(self) -> None:
        """Wait for the layer before the one just queued."""
        if not self._events:
            return
        self._events[self._n % 2].record()
        if self._n:
            self._events[(self._n - 1) % 2].synchronize()
        self._n += 1
