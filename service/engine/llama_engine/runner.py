"""A `Runner` over llama.cpp: documents and tails are its sequences in one unified cache, so that sequences share a
document's cells, and a step of several sequences is one batch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch

from cache_store.fingerprint import Fingerprint
from cache_store.layout import KVLayout, KVType
from service.engine.llama_engine.context import DeviceLost, LlamaContext
from service.engine.llama_engine.order import OrderedCells
from service.engine.llama_engine.places import LlamaDocument, LlamaTail
from service.engine.llama_engine.sizes import N_OWN
from service.engine.llama_engine.state import Bytes, StateFormat, StateMismatch
from service.engine.protocol import Rows, RunnerLimits

Between = Callable[[], None]
CHUNK_TOKENS = 256
"""Tokens of a document that are computed between two records."""


def compute_dtype(kv_type: KVType) -> str:
    """llama.cpp's own mixture; on a processor attention sums F16 values up in F16, quantized ones in F32."""
    return "ggml-f16" if kv_type.value_bits == 16 else "ggml"


class LlamaRunner:
    """`limits.n_documents` documents and `limits.n_slots` tails at a time; the cache has so many `cells` for either. A
    document is computed `step_tokens` at once, between which other work slips in.
    """

    device = torch.device("cpu")
    host_copies = None
    load_buffers = None

    def __init__(
        self,
        context: LlamaContext,
        layout: KVLayout,
        limits: RunnerLimits,
        fingerprint: Fingerprint,
        cells: tuple[int, int],
        *,
        name: str,
        tier: str = "host",
        step_tokens: int = CHUNK_TOKENS,
    ) -> None:
        self.layout, self.limits, self.name, self.tier = layout, limits, name, tier
        self.fingerprint = fingerprint
        self.compute_dtype = compute_dtype(layout.kv_type)
        self.watched_heads: Sequence[tuple[int, int]] = ()
        self._context = context
        self._form = StateFormat(layout)
        self._cells = OrderedCells(context, self._form, cells)
        self._step = step_tokens
        self._free = list(range(N_OWN, N_OWN + limits.n_documents + limits.n_slots))
        self._tails: dict[int, LlamaTail] = {}
        self._memory: Bytes | None = None
        """In which the last document from disk was put together: the next one's, since new pages take as long as what
        is copied to them. The plan counts one."""
        self._usable = True

    def close(self) -> None:
        """Free the model and all memory."""
        self._context.close()

    def usable(self) -> bool:
        return self._usable and self._cells.in_order

    def document_nbytes(self, n_tokens: int, n_slot_rows: int = 0) -> int:
        return n_tokens * self.layout.bytes_per_token

    def new_document(self, n_tokens: int) -> LlamaDocument:
        return LlamaDocument(self._free.pop(0), n_tokens, [0] * self.layout.n_layers, self.document_nbytes(n_tokens))

    def prepare_document(self, n_tokens: int) -> None:
        """All memory is there already."""

    def free_document(self, document: LlamaDocument) -> None:
        """Its cells, also from the tails behind it: they are given those of its next copy."""
        if document.freed:
            raise RuntimeError("the document is freed already")
        document.freed = True
        for tail in self._tails.values():
            if tail.document is document:
                self._detach(tail)
        self._cells.drop(document)
        self._free.append(document.sequence)

    def prefill_chunk(
        self, document: LlamaDocument, tokens: Sequence[int], between_layers: Between | None = None
    ) -> list[list[memoryview]]:
        first, n = document.n_tokens, len(tokens)
        if first % self.limits.chunk_tokens or n > self.limits.chunk_tokens or first + n > document.capacity:
            raise ValueError(f"a chunk of {n} tokens at {first} is off the chunk boundaries")
        if document.reserved is None:
            self._cells.reserve(document, self._tails.values())
        taken = first
        try:
            for at in range(0, n, self._step):
                part = tokens[at : at + self._step]
                self._cells.take(document, taken, taken + len(part))
                taken += len(part)
                self._decode(document.sequence, first + at, part)
                if between_layers is not None:
                    between_layers()
            records = self._read(document.sequence, first, first + n)
        except BaseException:
            self._cells.untake(document, first, taken)
            raise
        document.n_tokens = first + n
        if document.n_tokens == document.capacity:
            self._cells.end_reservation(document)
        document.loaded = [first + n] * self.layout.n_layers
        return records

    def load_blocks(
        self, document: LlamaDocument, layer: int, first_token: int, records: memoryview, n_tokens: int
    ) -> None:
        if document.state is None:
            document.state = self._form.new(document.capacity, memory=self._taken_memory(document.capacity))
        rows = self._form.rows(document.state, document.capacity)
        self._form.put(rows, layer, first_token, records, n_tokens)
        document.loaded[layer] += n_tokens

    def finish_load(
        self,
        document: LlamaDocument,
        n_tokens: int,
        *,
        next_position: int | None = None,
        last_position: int | None = None,
    ) -> None:
        state, document.state = document.state, None
        if state is None or document.loaded != [n_tokens] * self.layout.n_layers:
            raise ValueError(f"loaded {document.loaded} tokens per layer, not {n_tokens}")
        if next_position not in (None, n_tokens) or last_position not in (None, n_tokens - 1):
            self._refuse("rows that are not consecutive tokens")
        if n_tokens == document.capacity:
            self._cells.place(document, state, self._tails.values())
        else:
            rows = self._form.rows(state, document.capacity)
            head = replace(rows, keys=rows.keys[:, :n_tokens], values=rows.values[:, :n_tokens])
            self._cells.begin(document, head, self._tails.values())
        document.n_tokens = n_tokens
        self._memory = state if state.base is None else state.base

    def new_tail(self) -> int:
        slot = next((s for s in range(self.limits.n_slots) if s not in self._tails), None)
        if slot is None:
            raise RuntimeError("no free tail slot")
        self._tails[slot] = LlamaTail(self._free.pop(0))
        return slot

    def free_tail(self, slot: int) -> None:
        tail = self._tails.pop(slot)
        self._cells.leave(tail.sequence, tail.base)
        self._context.remove(tail.sequence)
        self._free.append(tail.sequence)
        if not any(other.n_placed for other in self._tails.values()):
            self._cells.forget_left()

    def tail_length(self, slot: int) -> int:
        return self._tails[slot].n_tokens

    def truncate_tail(self, slot: int, n_tokens: int) -> None:
        tail = self._tails[slot]
        if n_tokens > tail.n_tokens:
            raise ValueError(f"cannot cut a tail of {tail.n_tokens} tokens to {n_tokens}")
        if n_tokens < tail.n_placed:
            self._cells.leave(tail.sequence, tail.base + n_tokens)
        tail.drop_waiting(n_tokens)

    def export_tail(self, slot: int, first: int, last: int) -> list[list[memoryview]]:
        """They are in stored form already."""
        tail = self._tails[slot]
        if not 0 <= first <= last <= tail.n_placed:
            raise ValueError(f"tokens {first}..{last} of a tail of {tail.n_placed}")
        return self._read(tail.sequence, tail.base + first, tail.base + last) if last > first else []

    def import_tail(
        self, slot: int, blocks: Sequence[Sequence[bytes | memoryview]], n_tokens: int, *, fetched: bool = False
    ) -> None:
        tail = self._tails[slot]
        if fetched:
            self._refuse("fetched rows")
        if tail.n_tokens + n_tokens > self.limits.tail_tokens:
            raise ValueError(f"a tail holds at most {self.limits.tail_tokens} tokens")
        tail.waiting.append(self._form.of_blocks(blocks, n_tokens))
        tail.n_tokens += n_tokens

    def drop_fetched(self, slot: int) -> None:
        """There are none."""

    def forward(self, batch: Sequence[Rows]) -> list[torch.Tensor]:
        tails = [self._tails[rows.slot] for rows in batch]
        n_rows, n_waiting = sum(len(rows.tokens) for rows in batch), sum(tail.n_waiting for tail in tails)
        self._cells.make_room(n_rows, n_waiting, self._tails.values())
        try:
            for rows, tail in zip(batch, tails, strict=True):
                self._attach(tail, rows)
            logits = self._forward(batch, tails)
        except BaseException:
            for rows, tail in zip(batch, tails, strict=True):
                self._undo(rows, tail)
            raise
        for rows, tail in zip(batch, tails, strict=True):
            self._unfeed(rows, tail)
            tail.n_tokens += len(rows.tokens) - rows.refeed
        return list(logits.split([len(rows.tokens) - rows.logits_from for rows in batch]))

    def new_slots(self, document: Any, counts: Any) -> NoReturn:
        self._refuse("summary slots")

    def load_slots(self, document: Any, layer: int, records: memoryview) -> NoReturn:
        self._refuse("summary slots")

    def keep_prefix(self, document: Any, n_tokens: int) -> NoReturn:
        self._refuse("documents in segments")

    def replay(self, document: Any, tokens: Any, sinks: int, first: int, last: int, between_layers: Any = None) -> Any:
        self._refuse("the attention of a repetition")

    def question_queries(self, rows: Rows, heads: Any) -> NoReturn:
        self._refuse("queries of single heads")

    def watch_tail(self, slot: int) -> None:
        """Nothing is watched: llama.cpp does not give its attention."""

    def tail_looks(self, slot: int, document: Any, pieces: Sequence[int]) -> NoReturn:
        self._refuse("where an answer looked")

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(f"the llamacpp engine has no {what}")

    def _taken_memory(self, n_tokens: int) -> Bytes | None:
        """What is kept for states, where it is large enough for `n_tokens` tokens; it is not kept any longer."""
        memory, self._memory = self._memory, None
        return None if memory is None or len(memory) < self._form.nbytes(n_tokens) else memory

    def _read(self, sequence: int, first: int, last: int) -> list[list[memoryview]]:
        try:
            return self._form.records(self._cells.read(sequence, first, last))
        except (DeviceLost, StateMismatch):
            self._usable = False
            raise

    def _attach(self, tail: LlamaTail, rows: Rows) -> None:
        """Let a tail see its document, and put what was imported behind it."""
        document: LlamaDocument | None = rows.document
        if tail.n_tokens + len(rows.tokens) - rows.refeed > self.limits.tail_tokens:
            raise ValueError(f"a tail holds at most {self.limits.tail_tokens} tokens")
        if rows.refeed and (document is None or tail.n_tokens):
            raise ValueError("a document's last token is fed again only to an empty tail")
        if document is not tail.document:
            self._see(tail, document)
        while tail.waiting:
            self._cells.append(tail.sequence, tail.waiting[0], tail.base + tail.n_placed)
            tail.waiting.pop(0)
        if rows.refeed:
            self._context.remove(tail.sequence, tail.base - 1)

    def _see(self, tail: LlamaTail, document: LlamaDocument | None) -> None:
        base = 0 if document is None else document.next_position
        if tail.n_placed and base != tail.base:
            raise ValueError("the tail stands behind another document")
        if tail.document is not None:
            self._detach(tail)
        tail.document, tail.base = document, base
        if document is not None:
            if document.freed or document.n_tokens != document.capacity:
                raise RuntimeError("the document is freed, or not complete")
            self._context.share(document.sequence, tail.sequence, 0, base)

    def _detach(self, tail: LlamaTail) -> None:
        self._context.remove(tail.sequence, 0, tail.base)
        tail.document = None

    def _unfeed(self, rows: Rows, tail: LlamaTail) -> None:
        """The last token of a document is the document's again."""
        if rows.refeed and tail.document is not None:
            last = tail.base - 1
            self._cells.leave(tail.sequence, last, tail.base)
            self._context.share(tail.document.sequence, tail.sequence, last, tail.base)

    def _undo(self, rows: Rows, tail: LlamaTail) -> None:
        """Empty the cells of rows that came to nothing: they are the last ones."""
        document = tail.document if rows.refeed and not tail.n_tokens else None
        self._context.remove(tail.sequence, tail.base + tail.n_placed - (document is not None))
        if document is not None:
            self._context.share(document.sequence, tail.sequence, tail.base - 1, tail.base)

    def _forward(self, batch: Sequence[Rows], tails: Sequence[LlamaTail]) -> torch.Tensor:
        sizes = [len(rows.tokens) for rows in batch]
        tokens = np.concatenate([np.asarray(rows.tokens, np.int32) for rows in batch])
        starts = [tail.next_position - rows.refeed for rows, tail in zip(batch, tails, strict=True)]
        positions = np.concatenate([np.arange(at, at + n, dtype=np.int32) for at, n in zip(starts, sizes, strict=True)])
        sequences = np.repeat(np.array([tail.sequence for tail in tails], np.int32), sizes)
        wanted = np.concatenate([np.arange(n) >= rows.logits_from for rows, n in zip(batch, sizes, strict=True)])
        return self._computed(tokens, positions, sequences, wanted)

    def _decode(self, sequence: int, first: int, tokens: Sequence[int]) -> None:
        n = len(tokens)
        positions = np.arange(first, first + n, dtype=np.int32)
        self._computed(np.asarray(tokens, np.int32), positions, np.full(n, sequence, np.int32), np.zeros(n, bool))

    def _computed(self, tokens: Any, positions: Any, sequences: Any, wanted: Any) -> torch.Tensor:
        try:
            return self._context.decode(tokens, positions, sequences, wanted)
        except DeviceLost:
            self._usable = False
            raise
