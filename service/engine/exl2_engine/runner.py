"""The card engine's `Runner`: a `DecoderModel`'s layers around attention over the pool's quantized blocks.

One thread calls it; see `service.engine.protocol` for the contract. Everything here also runs on a CPU, in FP32 over
`plain` and the portable backend: that is how its logic is tested.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from cache_store.layout import KVType
from cache_store.pieces import Buffers
from service.engine.exl2_engine.backend import KVBackend
from service.engine.exl2_engine.best import best_of
from service.engine.exl2_engine.copies import CopyStream
from service.engine.exl2_engine.export import Export, Pace
from service.engine.exl2_engine.graph_sizes import ROWS as GRAPH_ROWS
from service.engine.exl2_engine.graphs import DecodeGraphs
from service.engine.exl2_engine.host_copies import BlockCopies
from service.engine.exl2_engine.host_memory import HostMemory
from service.engine.exl2_engine.model import DecoderModel
from service.engine.exl2_engine.pool import BlockPool, Document
from service.engine.exl2_engine.projections import rotated_qkv
from service.engine.exl2_engine.replay import Replay, Sight
from service.engine.exl2_engine.restore import BlockLoader
from service.engine.exl2_engine.rows import PackedStep, RowPlan, StepShape, pack, plan_rows, unpack
from service.engine.exl2_engine.slots import LayerSlots, write_slots
from service.engine.exl2_engine.step import Step
from service.engine.exl2_engine.tail_records import TailRecords
from service.engine.exl2_engine.tails import Tails
from service.engine.exl2_engine.watched import WatchedHeads, head_keys
from service.engine.ledger import Ledger
from service.engine.models.card import ModelCard, fingerprint
from service.engine.protocol import Rows, RunnerLimits
from service.engine.watch.masses import Looks, looks_of

ENGINE_VERSION = "exl2-1"
"""Part of every fingerprint: raise it when the same model, tokens and KV type would give other KV."""
CHUNK_TOKENS = 2048
HEAD_ROWS = 256
"""Rows that go through the head at once: logits of all rows of a long check would not fit the card."""


class Exl2Runner:
    """A model over documents in a block pool and tails in slots. `loading.load_runner` makes one.

    `graphs`: captured decode steps, once there are any. `ledger`: the plan of the card's memory, on a card.
    `host_copies`: where documents go that leave the card. `watched_heads` are known before a step is captured.
    """

    def __init__(
        self,
        model: DecoderModel,
        backend: KVBackend,
        card: ModelCard,
        kv_type: KVType,
        *,
        pool: BlockPool,
        tails: Tails,
        chunk_tokens: int = CHUNK_TOKENS,
        watched_heads: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.name = card.name
        self.compute_dtype = str(model.dtype).removeprefix("torch.")
        self.layout = pool.layout
        self.fingerprint = fingerprint(card, kv_type, self.compute_dtype, ENGINE_VERSION, chunk_tokens)
        self.limits = RunnerLimits(
            card.max_context,
            chunk_tokens,
            tails.n_slots,
            tails.capacity,
            card.vocab_size,
            sink_multiple=self.layout.block_tokens,
            ragged_slots=True,
        )
        self.pool = pool
        self._model = model
        self._document_model: DecoderModel = getattr(model, "for_documents", model)
        self.backend = backend
        self._tails = tails
        self.device = model.device
        self._on_card = model.device.type == "cuda"
        self._exports = torch.cuda.Stream(model.device) if self._on_card else None
        self._loader = BlockLoader(pool.layers, pool.layout, CopyStream(model.device))
        self._tail_records = TailRecords(tails, backend, model.device, self._exports)
        self.watched_heads = watched_heads
        self._watched = WatchedHeads(watched_heads, model, max(tails.n_slots, *GRAPH_ROWS))
        self._fused_append = getattr(backend, "fused_append", None)
        self.graphs: DecodeGraphs | None = None
        self.ledger: Ledger | None = None
        self.host_copies: BlockCopies | None = None

    @property
    def tier(self) -> str:
        return "gpu" if self._on_card else "host"

    def keep_in_host_memory(self, budget_nbytes: int) -> None:
        """Let documents that leave the card go to at most `budget_nbytes` bytes of host memory, allocated from now on
        in the background."""
        row = self.layout.record_nbytes(self.layout.block_tokens)
        memory = HostMemory(row, budget_nbytes, self.device)
        self.host_copies = BlockCopies(self.pool.layers, self.layout, CopyStream(self.device), memory)

    @property
    def tails_used(self) -> int:
        """Slots that hold a sequence's tail now."""
        return self._tails.used

    def document_nbytes(self, n_tokens: int, n_slot_rows: int = 0) -> int:
        """Bytes that a document of `n_tokens` tokens takes of the pool, its slots however they are spread."""
        return self.pool.document_nbytes(n_tokens, n_slot_rows)

    def usable(self) -> bool:
        """An illegal access makes every later call fail, waiting for the card included; running out of memory does
        not."""
        try:
            if self._on_card:
                torch.cuda.synchronize(self.device)
        except Exception:
            return False
        return True

    def new_document(self, n_tokens: int) -> Document:
        """Raises PoolExhausted when there are too few free blocks."""
        document = self.pool.take(n_tokens)
        self._loader.begin()
        return document

    def prepare_document(self, n_tokens: int) -> None:
        """Nothing to prepare: the pool is allocated at load."""

    def free_document(self, document: Document) -> None:
        self._loader.end()  # copies of a restore that was given up still write to its blocks
        self.pool.give_back(document)

    @torch.inference_mode()
    def prefill_chunk(
        self, document: Document, tokens: Sequence[int], between_layers: Callable[[], None] | None = None
    ) -> list[list[memoryview]]:
        """Raises ValueError when the chunk starts off a chunk boundary, does not fit the document, or gives KV that
        cannot be stored."""
        n, past = len(tokens), document.n_tokens
        on_boundary = document.positions is None and (past - document.prefix) % self.limits.chunk_tokens == 0
        if not on_boundary or not 0 < n <= self.limits.chunk_tokens:
            raise ValueError(f"a chunk of {n} tokens cannot follow {past} tokens")
        if past + n > document.capacity:
            raise ValueError(f"{n} more tokens do not fit a document of {document.capacity}")
        first = past // self.layout.block_tokens
        own = document.blocks[first : first + self.layout.n_blocks(n)]
        try:
            export = self._prefill(document, own, tokens, between_layers)
            records = export.finish()
        except BaseException:
            self.pool.wipe(own)
            raise
        document.n_tokens += n
        return records

    def _prefill(
        self, document: Document, own: Tensor, tokens: Sequence[int], between_layers: Callable[[], None] | None
    ) -> Export:
        model, backend, past, n = self._document_model, self.backend, document.n_tokens, len(tokens)
        export, pace = Export(self.layout, n, self.device, self._exports), Pace(self.device)
        positions = torch.arange(past, past + n, dtype=torch.int32, device=self.device)
        x = model.embed(self._to_device(torch.tensor(tokens, dtype=torch.int32)))
        for layer, pool in enumerate(self.pool.layers):
            q, k, v = rotated_qkv(model, backend, layer, x, positions)
            backend.encode(k, v, pool, own)
            export.add(layer, pool, own)
            if layer == model.n_layers - 1:
                break  # its KV is stored, and nobody wants logits
            out = backend.prefill(q, k, v, pool, document.blocks, past, model.scale)
            x = model.mlp(layer, model.attention_out(layer, out, x))
            if between_layers is not None:
                pace.layer_queued()
                between_layers()
        return export

    @property
    def load_buffers(self) -> Buffers:
        """Page-locked memory to read snapshots into."""
        return self._loader.buffers

    @torch.inference_mode()
    def load_blocks(self, document: Document, layer: int, first_token: int, records: memoryview, n_tokens: int) -> None:
        """Raises ValueError when the records are not those of `n_tokens` tokens from a block's first on."""
        if first_token % self.layout.block_tokens or first_token + n_tokens > document.capacity:
            raise ValueError(f"{n_tokens} tokens at {first_token} are not blocks of a document of {document.capacity}")
        self._loader.load(document.block_ids, layer, first_token, records, n_tokens)

    @torch.inference_mode()
    def new_slots(self, document: Document, counts: Sequence[Sequence[int]]) -> None:
        """Raises PoolExhausted when there are too few free blocks, ValueError for counts that are not the model's and
        for a document that has slots."""
        self.pool.take_slots(document, counts)
        self._loader.begin()

    @torch.inference_mode()
    def load_slots(self, document: Document, layer: int, records: memoryview) -> None:
        if document.slots is None:
            raise ValueError("the document has no slots")
        with self._loader.queued():
            write_slots(records, document.slots, document.block_ids, layer, self.layout, self.pool.records)

    def finish_load(
        self, document: Document, n_tokens: int, *, next_position: int | None = None, last_position: int | None = None
    ) -> None:
        """`last_position` is by default the one before `next_position`."""
        self._loader.end()
        document.n_tokens = n_tokens
        last = next_position - 1 if last_position is None and next_position is not None else last_position
        document.positions = None if next_position is None or last is None else (next_position, last)

    @torch.inference_mode()
    def keep_prefix(self, document: Document, n_tokens: int) -> None:
        """The blocks behind are zeroed for the tokens to come. Raises ValueError when `n_tokens` are no whole blocks,
        more than there are, or not at consecutive positions."""
        there = 0 <= n_tokens <= document.n_tokens and document.positions is None
        if n_tokens % self.limits.sink_multiple or not there:
            raise ValueError(f"the first {n_tokens} tokens of {document.n_tokens} cannot be kept")
        self.pool.wipe(document.blocks[n_tokens // self.layout.block_tokens :])
        self._loader.begin()  # what is loaded next must not be wiped
        document.n_tokens = document.prefix = n_tokens

    @torch.inference_mode()
    def replay(
        self,
        document: Document,
        tokens: Sequence[int],
        sinks: int,
        first: int,
        last: int,
        between_layers: Callable[[], None] | None = None,
    ) -> Tensor:
        """`tokens` of at most a chunk are computed at once and are in the memory plan, more of them slice by slice.
        Raises ValueError without any, and unless sinks and [first, last) lie in the document, one behind the other."""
        if not tokens:
            raise ValueError("nothing to replay")
        sight = Sight.of(document, sinks, first, last)
        run = Replay(self._document_model, self.backend, sight, self.limits.chunk_tokens)
        ids = self._to_device(torch.tensor(tokens, dtype=torch.int32))
        return run(self.pool.layers, document, ids, between_layers)

    def new_tail(self) -> int:
        return self._tails.take()

    def free_tail(self, slot: int) -> None:
        self._watched.kept.end(slot)
        self._tails.give_back(slot)

    def tail_length(self, slot: int) -> int:
        return self._tails.length(slot)

    def truncate_tail(self, slot: int, n_tokens: int) -> None:
        self._watched.kept.drop(slot, max(self._tails.length(slot) - n_tokens, 0))
        self._tails.truncate(slot, n_tokens)

    @torch.inference_mode()
    def export_tail(self, slot: int, first: int, last: int) -> list[list[memoryview]]:
        """Raises ValueError when the tail has no such tokens, or their KV cannot be stored."""
        return self._tail_records.export(slot, first, last)

    @torch.inference_mode()
    def import_tail(
        self, slot: int, blocks: Sequence[Sequence[bytes | memoryview]], n_tokens: int, *, fetched: bool = False
    ) -> None:
        """Raises ValueError when the tokens do not fit the tail, or a second run of them is fetched."""
        self._tail_records.append(slot, blocks, n_tokens, fetched=fetched)

    @torch.inference_mode()
    def drop_fetched(self, slot: int) -> None:
        self._tails.drop_fetched(slot)

    @torch.inference_mode()
    def question_queries(self, rows: Rows, heads: Sequence[tuple[int, int]]) -> Tensor:
        """Raises ValueError when the model has not these heads, or the tail no room for the rows, which are written
        behind it and not counted."""
        model = self._model
        if not heads or not all(0 <= i < model.n_layers and 0 <= h < model.n_kv_heads for i, h in heads):
            raise ValueError(f"the model has no KV heads {list(heads)}")
        plan = plan_rows([rows], self._tails)
        packed = self._packed(plan, StepShape.of(plan))
        x, found = model.embed(packed.ids), {}
        deepest = max(layer for layer, _ in heads)
        for layer in range(deepest + 1):
            q = self._append(layer, x, packed.step)
            by_head = q.unflatten(1, (model.n_kv_heads, -1)).permute(1, 2, 0, 3)
            found |= {(i, head): by_head[head].float() for i, head in heads if i == layer}
            if layer < deepest:
                x = self._after_append(layer, q, x, packed.step)
        return torch.stack([found[layer, head] for layer, head in heads]) * model.scale

    def watch_tail(self, slot: int) -> None:
        self._watched.kept.begin(slot)

    @torch.inference_mode()
    def tail_looks(self, slot: int, document: Document, pieces: Sequence[int]) -> Looks:
        """Raises ValueError when fewer rows were watched."""
        kept = self._watched.kept
        queries = kept.last(slot, sum(pieces)).float() * self._model.scale
        kept.end(slot)
        keys = [head_keys(self.pool, document, self._tails, slot, layer, head) for layer, head in self.watched_heads]
        return looks_of(list(queries), keys, pieces)

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows]) -> list[Any]:
        """Raises ValueError when a sequence has no room for its rows."""
        plan = plan_rows(batch, self._tails)
        slots = [batch[i].slot for i in plan.order]
        watched = self._watched.watches(slots)
        logits, queries = self.graphs.run(plan) if self.graphs is not None else None, self._watched.captured
        if logits is None:
            queries = self._watched.room(len(plan.wanted)) if watched else None
            logits = self._eager(plan, queries)
        if watched and queries is not None:
            self._watched.keep(slots, queries, plan.n_wanted)
        if all(rows.only_best for rows in batch):
            found = best_of(logits, how_sure=any(rows.how_sure for rows in batch))
        else:
            found = self._to_host(logits)
        for rows in batch:
            self._tails.extend(rows.slot, len(rows.tokens) - rows.refeed)
        return plan.by_sequence(found)

    def _eager(self, plan: RowPlan, queries: Tensor | None) -> Tensor:
        """Logits FP32 ``[wanted, vocab]`` on the device; on the host when they are many. `queries` gets the wanted
        rows' queries of watched heads."""
        shape = StepShape.of(plan)
        packed = self._packed(plan, shape)
        rows = packed.wanted[: len(plan.wanted)]
        take = None if queries is None else partial(self._watched.take, into=queries, rows=rows)
        wanted = self.hidden(packed, take).index_select(0, rows)
        if not len(wanted):
            return torch.empty((0, self._model.vocab_size), device=self.device)
        if len(wanted) <= HEAD_ROWS:
            return self._model.head(wanted).float()
        return torch.cat([self._model.head(part).float().cpu() for part in wanted.split(HEAD_ROWS)])

    def _packed(self, plan: RowPlan, shape: StepShape) -> PackedStep:
        return unpack(self._to_device(pack(plan, shape, pinned=self._on_card)), shape)

    def hidden(self, packed: PackedStep, take: Callable[[int, Tensor], object] | None = None) -> Tensor:
        """Hidden states ``[R, hidden_size]`` behind the last layer; writes the rows' KV to their tails. `take` gets the
        queries of every layer."""
        x = self._model.embed(packed.ids)
        for layer in range(self._model.n_layers):
            q = self._append(layer, x, packed.step)
            if take is not None:
                take(layer, q)
            x = self._after_append(layer, q, x, packed.step)
        return x

    def _after_append(self, layer: int, q: Tensor, x: Tensor, step: Step) -> Tensor:
        """Hidden states behind a layer."""
        model, tails = self._model, self._tails
        pool, slots = self.pool, LayerSlots(self.pool.records, self.pool.slot_table, layer)
        tail_k, tail_v = tails.k[layer], tails.v[layer]
        out = self.backend.attend(step, q, pool.layers[layer], tail_k, tail_v, model.scale, slots=slots)
        return model.mlp(layer, model.attention_out(layer, out, x))

    def _append(self, layer: int, x: Tensor, step: Step) -> Tensor:
        """Write the rows' keys and values to their tails; gives the queries as attention takes them."""
        tail_k, tail_v = self._tails.k[layer], self._tails.v[layer]
        if self._fused_append is not None:
            q, k, v = self._model.qkv(layer, x)
            return self._fused_append(q, k, v, step, *self._model.rope(layer), tail_k, tail_v)
        q, k, v = rotated_qkv(self._model, self.backend, layer, x, step.positions)
        self.backend.append(step, k, v, tail_k, tail_v)
        return q

    def step_logits(self, packed: PackedStep) -> Tensor:
        """Logits FP32 ``[R, vocab]`` of every row: the body of a captured decode step."""
        take = partial(self._watched.take, into=self._watched.captured)
        return self._model.head(self.hidden(packed, take)).float()

    def _to_device(self, host: Tensor) -> Tensor:
        if not self._on_card:
            return host
        pinned = host if host.is_pinned() else host.pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def _to_host(self, logits: Tensor) -> Tensor:
        """Waits for the step. The memory is the caller's for as long as it keeps it."""
        if not logits.is_cuda:
            return logits
        host = torch.empty(logits.shape, dtype=torch.float32, pin_memory=True)
        host.copy_(logits, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return cast(Tensor, host)
