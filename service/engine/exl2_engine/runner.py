"""The card engine's `Runner`: a `DecoderModel`'s layers around attention over the pool's quantized blocks.

One thread calls it; see `service.engine.protocol` for the contract. Everything here also runs on a CPU, in FP32 over
`plain` and the portable backend: that is how its logic is tested.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from cache_store.layout import KVType
from cache_store.pieces import Buffers
from service.engine.exl2_engine.backend import KVBackend
from service.engine.exl2_engine.copies import CopyStream
from service.engine.exl2_engine.export import Export, Pace
from service.engine.exl2_engine.graphs import DecodeGraphs
from service.engine.exl2_engine.host_copies import BlockCopies
from service.engine.exl2_engine.host_memory import HostMemory
from service.engine.exl2_engine.ledger import Ledger
from service.engine.exl2_engine.model import DecoderModel
from service.engine.exl2_engine.pool import BlockPool, Document
from service.engine.exl2_engine.records import as_tensor
from service.engine.exl2_engine.records import unpack as unpack_records
from service.engine.exl2_engine.restore import BlockLoader
from service.engine.exl2_engine.rows import PackedStep, RowPlan, StepShape, pack, plan_rows, unpack
from service.engine.exl2_engine.step import Step
from service.engine.exl2_engine.tails import Tails
from service.engine.models.card import ModelCard, fingerprint
from service.engine.protocol import Rows, RunnerLimits

ENGINE_VERSION = "exl2-1"
"""Part of every fingerprint: raise it when the same model, tokens and KV type would give other KV."""
CHUNK_TOKENS = 2048
HEAD_ROWS = 256
"""Rows that go through the head at once: logits of all rows of a long check would not fit the card."""


class Exl2Runner:
    """A model over documents in a block pool and tails in slots. `loading.load_runner` makes one.

    `graphs`: captured decode steps, once there are any. `ledger`: the plan of the card's memory, on a card.
    `host_copies`: where documents go that leave the card.
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
    ) -> None:
        self.name = card.name
        self.compute_dtype = str(model.dtype).removeprefix("torch.")
        self.layout = pool.layout
        self.fingerprint = fingerprint(card, kv_type, self.compute_dtype, ENGINE_VERSION, chunk_tokens)
        self.limits = RunnerLimits(card.max_context, chunk_tokens, tails.n_slots, tails.capacity, card.vocab_size)
        self.pool = pool
        self._model = model
        self._document_model: DecoderModel = getattr(model, "for_documents", model)
        self.backend = backend
        self._tails = tails
        self._device = model.device
        self._on_card = model.device.type == "cuda"
        self._exports = torch.cuda.Stream(model.device) if self._on_card else None
        self._loader = BlockLoader(pool.layers, pool.layout, CopyStream(model.device))
        self._fused_append = getattr(backend, "fused_append", None)
        self._scratch: Tensor | None = None
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
        memory = HostMemory(row, budget_nbytes, self._device)
        self.host_copies = BlockCopies(self.pool.layers, self.layout, CopyStream(self._device), memory)

    @property
    def tails_used(self) -> int:
        """Slots that hold a sequence's tail now."""
        return self._tails.used

    def document_nbytes(self, n_tokens: int) -> int:
        """Bytes that a document of `n_tokens` tokens takes of the pool."""
        return self.pool.document_nbytes(n_tokens)

    def usable(self) -> bool:
        """An illegal access makes every later call fail, waiting for the card included; running out of memory does
        not."""
        try:
            if self._on_card:
                torch.cuda.synchronize(self._device)
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
        if past % self.limits.chunk_tokens or not 0 < n <= self.limits.chunk_tokens:
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
        export, pace = Export(self.layout, n, self._device, self._exports), Pace(self._device)
        positions = torch.arange(past, past + n, dtype=torch.int32, device=self._device)
        x = model.embed(self._to_device(torch.tensor(tokens, dtype=torch.int32)))
        for layer, pool in enumerate(self.pool.layers):
            q, k, v = self._rotated_qkv(model, layer, x, positions)
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

    def finish_load(self, document: Document, n_tokens: int) -> None:
        self._loader.end()
        document.n_tokens = n_tokens

    def new_tail(self) -> int:
        return self._tails.take()

    def free_tail(self, slot: int) -> None:
        self._tails.give_back(slot)

    def tail_length(self, slot: int) -> int:
        return self._tails.length(slot)

    def truncate_tail(self, slot: int, n_tokens: int) -> None:
        self._tails.truncate(slot, n_tokens)

    @torch.inference_mode()
    def export_tail(self, slot: int, first: int, last: int) -> list[list[memoryview]]:
        """Raises ValueError when the tail has no such tokens, or their KV cannot be stored."""
        if not 0 <= first < last <= self._tails.length(slot):
            raise ValueError(f"tokens {first} to {last} are not in a tail of {self._tails.length(slot)}")
        n, backend = last - first, self.backend
        pool, blocks = self._scratch_blocks(n)
        export = Export(self.layout, n, self._device, self._exports)
        for layer in range(self.layout.n_layers):
            k, v = self._tails.tokens(layer, slot, first, last)
            backend.encode(k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous(), pool, blocks)
            export.add(layer, pool, blocks)
            backend.decode(pool, blocks, n, k, v)
        return export.finish()

    @torch.inference_mode()
    def import_tail(self, slot: int, blocks: Sequence[Sequence[bytes | memoryview]], n_tokens: int) -> None:
        """Raises ValueError when the tokens do not fit the tail."""
        end = self._tails.check_room(slot, n_tokens)
        pool, numbers = self._scratch_blocks(n_tokens)
        for layer in range(self.layout.n_layers):
            records = as_tensor(bytearray().join(block[layer] for block in blocks))
            unpack_records(records, n_tokens, self.layout, pool)
            self.backend.decode(pool, numbers, n_tokens, *self._tails.tokens(layer, slot, end - n_tokens, end))
        self._tails.extend(slot, n_tokens)

    def _scratch_blocks(self, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Blocks of one layer for a tail's tokens, and their numbers. They stay allocated for the next time."""
        n, nbytes = self.layout.n_blocks(n_tokens), self.layout.record_nbytes(self.layout.block_tokens)
        if self._scratch is None:
            most = self.layout.n_blocks(self._tails.capacity)
            self._scratch = torch.zeros((most, nbytes), dtype=torch.uint8, device=self._device)
        self._scratch.zero_()
        return self._scratch, torch.arange(n, dtype=torch.int32, device=self._device)

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows]) -> list[Tensor]:
        """Raises ValueError when a sequence has no room for its rows."""
        plan = plan_rows(batch, self._tails)
        logits = self.graphs.run(plan) if self.graphs is not None else None
        if logits is None:
            logits = self._eager(plan)
        host = self._to_host(logits)
        for rows in batch:
            self._tails.extend(rows.slot, len(rows.tokens) - rows.refeed)
        return plan.by_sequence(host)

    def _eager(self, plan: RowPlan) -> Tensor:
        """Logits FP32 ``[wanted, vocab]`` on the device; on the host when they are many."""
        shape = StepShape.of(plan)
        packed = unpack(self._to_device(pack(plan, shape, pinned=self._on_card)), shape)
        x = self.hidden(packed)
        wanted = x.index_select(0, packed.wanted[: len(plan.wanted)])
        if not len(wanted):
            return torch.empty((0, self._model.vocab_size), device=self._device)
        if len(wanted) <= HEAD_ROWS:
            return self._model.head(wanted).float()
        return torch.cat([self._model.head(part).float().cpu() for part in wanted.split(HEAD_ROWS)])

    def hidden(self, packed: PackedStep) -> Tensor:
        """Hidden states ``[R, hidden_size]`` behind the last layer; writes the rows' KV to their tails."""
        model, backend, step, tails = self._model, self.backend, packed.step, self._tails
        x = model.embed(packed.ids)
        for layer, pool in enumerate(self.pool.layers):
            q = self._append(layer, x, step)
            out = backend.attend(step, q, pool, tails.k[layer], tails.v[layer], model.scale)
            x = model.mlp(layer, model.attention_out(layer, out, x))
        return x

    def _append(self, layer: int, x: Tensor, step: Step) -> Tensor:
        """Write the rows' keys and values to their tails; gives the queries as attention takes them."""
        tail_k, tail_v = self._tails.k[layer], self._tails.v[layer]
        if self._fused_append is not None:
            q, k, v = self._model.qkv(layer, x)
            return self._fused_append(q, k, v, step, *self._model.rope(layer), tail_k, tail_v)
        q, k, v = self._rotated_qkv(self._model, layer, x, step.positions)
        self.backend.append(step, k, v, tail_k, tail_v)
        return q

    def step_logits(self, packed: PackedStep) -> Tensor:
        """Logits FP32 ``[R, vocab]`` of every row: the body of a captured decode step."""
        return self._model.head(self.hidden(packed)).float()

    def _rotated_qkv(
        self, model: DecoderModel, layer: int, x: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as attention and storage take them: after RoPE, in the codec's space."""
        q, k, v = model.qkv(layer, x)
        inv_freq, scaling = model.rope(layer)
        turn = self.backend.rope_and_rotate
        return turn(q, positions, inv_freq, scaling), turn(k, positions, inv_freq, scaling), self.backend.rotate(v)

    def _to_device(self, host: Tensor) -> Tensor:
        if not self._on_card:
            return host
        pinned = host if host.is_pinned() else host.pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def _to_host(self, logits: Tensor) -> Tensor:
        """Waits for the step. The memory is the caller's for as long as it keeps it."""
        if not logits.is_cuda:
            return logits
        host = torch.empty(logits.shape, dtype=torch.float32, pin_memory=True)
        host.copy_(logits, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return cast(Tensor, host)
