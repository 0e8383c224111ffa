"""Tails in stored form: out of the card as encoded blocks, and back."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from cache_store.layout import KVLayout
from service.engine.exl2_engine.backend import KVBackend
from service.engine.exl2_engine.copies import host_memory
from service.engine.exl2_engine.export import Export
from service.engine.exl2_engine.records import unpack
from service.engine.exl2_engine.tails import Tails

IMPORT_NBYTES = 32 << 20
"""Records on their way into a tail that are on the card at a time, at least those of a layer."""


class TailRecords:
    """Encodes and decodes tokens of `tails`. `stream`: where records are copied to the host, on a card."""

    def __init__(
        self, tails: Tails, backend: KVBackend, device: torch.device, stream: "torch.cuda.Stream | None"
    ) -> None:
        self._tails = tails
        self._backend = backend
        self._layout: KVLayout = backend.layout
        self._device = device
        self._stream = stream
        self._scratch: Tensor | None = None

    def export(self, slot: int, first: int, last: int) -> list[list[memoryview]]:
        """Encode tokens [first, last), and put their decoded form in their place. Raises ValueError when the tail has
        no such tokens, or their KV cannot be stored."""
        if not 0 <= first < last <= self._tails.length(slot):
            raise ValueError(f"tokens {first} to {last} are not in a tail of {self._tails.length(slot)}")
        n, backend = last - first, self._backend
        pool, blocks = self._blocks(n)
        export = Export(self._layout, n, self._device, self._stream)
        for layer in range(self._layout.n_layers):
            k, v = self._tails.tokens(layer, slot, first, last)
            backend.encode(k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous(), pool, blocks)
            export.add(layer, pool, blocks)
            backend.decode(pool, blocks, n, k, v)
        return export.finish()

    def append(
        self, slot: int, blocks: Sequence[Sequence[bytes | memoryview]], n_tokens: int, *, fetched: bool = False
    ) -> None:
        """Decode stored tokens behind a tail; `fetched` ones are rows of the document. Raises ValueError when they do
        not fit the tail, or it has fetched ones already."""
        if fetched and self._tails.has_fetched(slot):
            raise ValueError("a tail holds one run of fetched tokens")
        end = self._tails.check_room(slot, n_tokens)
        if not n_tokens:
            return
        pool, numbers = self._blocks(n_tokens)
        for layer, records in self._on_device(blocks, n_tokens):
            unpack(records, n_tokens, self._layout, pool)
            self._backend.decode(pool, numbers, n_tokens, *self._tails.tokens(layer, slot, end - n_tokens, end))
        self._tails.extend(slot, n_tokens)
        if fetched:
            self._tails.mark_fetched(slot, n_tokens)

    def _on_device(self, blocks: Sequence[Sequence[bytes | memoryview]], n_tokens: int) -> Iterator[tuple[int, Tensor]]:
        """Each layer's records one behind the other, uint8. Several layers are copied at once, from pinned memory:
        hundreds of small copies of ordinary memory, each waited for, would take longer than all the rest."""
        nbytes = sum(self._layout.record_nbytes(n) for n in self._layout.block_lengths(n_tokens))
        at_once = max(1, IMPORT_NBYTES // nbytes)
        for first in range(0, self._layout.n_layers, at_once):
            layers = range(first, min(first + at_once, self._layout.n_layers))
            joined = b"".join(block[layer] for layer in layers for block in blocks)
            if len(joined) != nbytes * len(layers):
                raise ValueError(
                    f"{len(joined)} bytes are not the records of {n_tokens} tokens in {len(layers)} layers"
                )
            host = host_memory(len(joined), self._device)
            host.numpy()[:] = np.frombuffer(joined, np.uint8)
            yield from zip(layers, host.to(self._device, non_blocking=True).split(nbytes), strict=True)

    def _blocks(self, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Blocks of one layer for a tail's tokens, and their numbers. They stay allocated for the next time."""
        n, nbytes = self._layout.n_blocks(n_tokens), self._layout.record_nbytes(self._layout.block_tokens)
        if self._scratch is None:
            most = self._layout.n_blocks(self._tails.capacity)
            self._scratch = torch.zeros((most, nbytes), dtype=torch.uint8, device=self._device)
        self._scratch.zero_()
        return self._scratch, torch.arange(n, dtype=torch.int32, device=self._device)
