"""The torch engine's `Runner`: one thread calls it; see `service.engine.protocol` for the contract."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from cache_store.codec import decode_records, encode_records, rotate
from cache_store.layout import KVType
from cache_store.slots import Counts
from service.engine.models.card import fingerprint
from service.engine.protocol import Rows, RunnerLimits
from service.engine.torch_engine.attention import causal_mask
from service.engine.torch_engine.kv import DocumentKV, KVMemory, TailPool
from service.engine.torch_engine.linear import MOST_ROWS
from service.engine.torch_engine.loading import LoadedModel, load_model
from service.engine.torch_engine.plan import Group, Plan, PrefillDone, PrefillPlan, SequenceRows, StepPlan
from service.engine.torch_engine.probes import QueriesPlan, ReplayPlan
from service.engine.torch_engine.scratch import Scratch
from service.engine.torch_engine.slots import SlotRows, slots_nbytes
from service.engine.torch_engine.watched import head_keys, watched_queries
from service.engine.watch.masses import Looks, looks_of
from service.engine.watch.queries import KeptQueries

ENGINE_VERSION = "torch-1"
"""Part of every fingerprint: raise it when the same model, tokens and KV type would give other KV."""
CHUNK_TOKENS = 768
DRAFT_TOKENS = 7
"""With the token before them eight rows: so many are attended to by `FewRows` in BF16 too."""


class TorchRunner:
    """A transformers model over documents and tails held in memory; `load` makes one."""

    tier = "host"
    host_copies = None
    load_buffers = None

    def __init__(
        self, loaded: LoadedModel, kv_type: KVType, *, n_slots: int, tail_tokens: int, chunk_tokens: int
    ) -> None:
        card = loaded.card
        self.name = card.name
        self.compute_dtype = str(loaded.compute_dtype).removeprefix("torch.")
        self.layout = card.layout(kv_type)
        self.fingerprint = fingerprint(card, kv_type, self.compute_dtype, ENGINE_VERSION, chunk_tokens)
        limits = (card.max_context, chunk_tokens, n_slots, tail_tokens, card.vocab_size)
        self.limits = RunnerLimits(*limits, ragged_slots=True, draft_tokens=DRAFT_TOKENS)
        self._model = loaded.model
        self._lean = loaded.lean
        self._scratch = Scratch()
        self.device = loaded.device
        exact = torch.float32 if loaded.device.type == "cpu" else loaded.compute_dtype
        self._memory = KVMemory(self.layout, exact, loaded.compute_dtype, loaded.device)
        # A tail has another length at every step. In BF16 each would have the CPU library compile and keep a product.
        self._tails = TailPool(KVMemory(self.layout, exact, exact, loaded.device), n_slots, tail_tokens)
        self.watched_heads: Sequence[tuple[int, int]] = ()
        self._kept = KeptQueries()
        self._rotation = None if kv_type is KVType.FP16 else rotate(torch.eye(card.head_dim)).to(loaded.device)

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        kv_type: KVType,
        compute_dtype: str = "bfloat16",
        n_slots: int = 16,
        tail_tokens: int = 2048,
        threads: int | None = None,
        device: str = "cpu",
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> "TorchRunner":
        """Load an imported model. `threads` None leaves torch's choice. Raises what `load_model` raises."""
        if threads:
            torch.set_num_threads(threads)
        loaded = load_model(model_dir, compute_dtype, device)
        return cls(loaded, kv_type, n_slots=n_slots, tail_tokens=tail_tokens, chunk_tokens=chunk_tokens)

    @property
    def tails_used(self) -> int:
        """Slots that hold a sequence's tail now."""
        return self._tails.used

    @property
    def weights_nbytes(self) -> int:
        """Bytes of the model's parameters, shared ones once."""
        return sum(p.nbytes for p in self._model.parameters())

    def usable(self) -> bool:
        return True

    def document_nbytes(self, n_tokens: int, n_slot_rows: int = 0) -> int:
        return self._memory.nbytes(n_tokens) + slots_nbytes(self._memory, n_slot_rows)

    def new_document(self, n_tokens: int) -> DocumentKV:
        return DocumentKV(self._memory, n_tokens)

    def prepare_document(self, n_tokens: int) -> None:
        self._memory.prepare(n_tokens)

    def free_document(self, document: DocumentKV) -> None:
        document.free()

    def prefill_chunk(
        self, document: DocumentKV, tokens: Sequence[int], between_layers: Callable[[], None] | None = None
    ) -> list[list[memoryview]]:
        """Raises ValueError when the chunk starts off a chunk boundary or does not fit the document."""
        n, block = len(tokens), self.layout.block_tokens
        whole_chunks = document.consecutive and (document.n_tokens - document.prefix) % self.limits.chunk_tokens == 0
        if not whole_chunks or not 0 < n <= self.limits.chunk_tokens:
            raise ValueError(f"a chunk of {n} tokens cannot follow {document.n_tokens} tokens")
        if document.n_tokens + n > document.capacity_tokens:
            raise ValueError(f"{n} more tokens do not fit a document of {document.capacity_tokens}")
        plan = PrefillPlan(document, self._rotation, between_layers)
        positions = torch.arange(document.n_tokens, document.n_tokens + n)
        with contextlib.suppress(PrefillDone):
            self._run(tokens, positions, plan, torch.tensor([n - 1]))
        document.n_tokens += n
        return [[records[i] for records in plan.records] for i in range(-(-n // block))]

    def load_blocks(
        self, document: DocumentKV, layer: int, first_token: int, records: memoryview, n_tokens: int
    ) -> None:
        target = slice(first_token, first_token + n_tokens)
        self._decode(records, n_tokens, document.k[layer, :, target], document.v[layer, :, target])

    def new_slots(self, document: DocumentKV, counts: Counts) -> None:
        document.slots = SlotRows(self._memory, counts)

    def load_slots(self, document: DocumentKV, layer: int, records: memoryview) -> None:
        if document.slots is None:
            raise ValueError("the document has no slots")
        document.slots.load(layer, self._on_device(records), rotated=self._rotation is not None)

    def finish_load(
        self,
        document: DocumentKV,
        n_tokens: int,
        *,
        next_position: int | None = None,
        last_position: int | None = None,
    ) -> None:
        document.place(n_tokens, next_position, last_position)

    def keep_prefix(self, document: DocumentKV, n_tokens: int) -> None:
        multiple = self.limits.sink_multiple
        if n_tokens % multiple or not 0 <= n_tokens <= document.n_tokens or not document.consecutive:
            raise ValueError(f"cannot keep {n_tokens} of a document's {document.n_tokens} tokens")
        document.place(n_tokens)
        document.prefix = n_tokens

    def replay(
        self,
        document: DocumentKV,
        tokens: Sequence[int],
        sinks: int,
        first: int,
        last: int,
        between_layers: Callable[[], None] | None = None,
    ) -> Tensor:
        """Raises ValueError unless sinks and tokens lie in the document one behind the other.

        A layer is computed for all `tokens` at once: a few thousand keep memory and the pauses of others small.
        """
        if not (0 <= sinks <= first < last <= document.n_tokens and tokens):
            raise ValueError(f"sinks {sinks} and tokens {first} to {last} of a document of {document.n_tokens}")
        plan = ReplayPlan(document, sinks, first, last, self._rotation, between_layers)
        positions = torch.arange(document.next_position, document.next_position + len(tokens))
        with contextlib.suppress(PrefillDone):
            self._run(tokens, positions, plan, torch.tensor([len(tokens) - 1]))
        return torch.stack(plan.looks)

    def question_queries(self, rows: Rows, heads: Sequence[tuple[int, int]]) -> Tensor:
        """Raises ValueError when the model has not these heads, or the tail no room for the rows."""
        layout = self.layout
        if not heads or not all(0 <= i < layout.n_layers and 0 <= h < layout.n_kv_heads for i, h in heads):
            raise ValueError(f"the model has no KV heads {list(heads)}")
        member = self._member(rows, first=0)
        plan = QueriesPlan(StepPlan([Group(rows.document, [member])], self._rotation), heads)
        with contextlib.suppress(PrefillDone):
            self._run(rows.tokens, self._positions(rows, member), plan, torch.tensor([member.n - 1]))
        return plan.queries

    def new_tail(self) -> int:
        return self._tails.take()

    def free_tail(self, slot: int) -> None:
        self._kept.end(slot)
        self._tails.give_back(slot)

    def tail_length(self, slot: int) -> int:
        return self._tails[slot].length

    def truncate_tail(self, slot: int, n_tokens: int) -> None:
        tail = self._tails[slot]
        self._kept.drop(slot, tail.length - n_tokens)
        tail.cut(n_tokens)

    def export_tail(self, slot: int, first: int, last: int) -> list[list[memoryview]]:
        k, v = self._tail_views(slot, first, last)
        layers: list[list[memoryview]] = []
        for layer in range(self.layout.n_layers):
            rotated = self._rotation is not None
            records = encode_records(k[layer].cpu(), v[layer].cpu(), self.layout, rotated=rotated)
            self._decode(memoryview(bytearray().join(records)), last - first, k[layer], v[layer])
            layers.append(records)
        return [list(block) for block in zip(*layers, strict=True)]

    def import_tail(
        self, slot: int, blocks: Sequence[Sequence[bytes | memoryview]], n_tokens: int, *, fetched: bool = False
    ) -> None:
        tail = self._tails[slot]
        end = tail.length + n_tokens
        if end > tail.capacity:
            raise ValueError(f"{n_tokens} stored tokens do not fit a tail of {tail.capacity}")
        k, v = tail.k[:, :, tail.length : end], tail.v[:, :, tail.length : end]
        for layer in range(self.layout.n_layers):
            records = memoryview(bytearray().join(block[layer] for block in blocks))
            self._decode(records, n_tokens, k[layer], v[layer])
        if fetched:
            tail.mark_fetched(n_tokens)
        tail.length = end

    def drop_fetched(self, slot: int) -> None:
        self._tails[slot].drop_fetched()

    def watch_tail(self, slot: int) -> None:
        self._kept.begin(slot)

    @torch.inference_mode()
    def tail_looks(self, slot: int, document: DocumentKV, pieces: Sequence[int]) -> Looks:
        """Raises ValueError when fewer rows were watched."""
        queries = self._kept.last(slot, sum(pieces))
        self._kept.end(slot)
        keys = [head_keys(document, self._tails[slot], layer, head) for layer, head in self.watched_heads]
        return looks_of(list(queries), keys, pieces)

    def forward(self, batch: Sequence[Rows]) -> list[Tensor]:
        """Raises ValueError when a sequence has no room for its rows."""
        ordered = sorted(range(len(batch)), key=lambda i: id(batch[i].document))
        tokens: list[int] = []
        positions: list[Tensor] = []
        wanted: list[Tensor] = []
        groups: list[Group] = []
        for i in ordered:
            rows = batch[i]
            member = self._member(rows, first=len(tokens))
            if groups and groups[-1].document is rows.document:
                groups[-1].members.append(member)
            else:
                groups.append(Group(rows.document, [member]))
            positions.append(self._positions(rows, member))
            wanted.append(torch.arange(member.first + rows.logits_from, member.first + member.n))
            tokens.extend(rows.tokens)
        watched = [batch[i].slot for i in ordered] if any(rows.slot in self._kept for rows in batch) else []
        layers = {layer for layer, _ in self.watched_heads} if watched else ()
        all_wanted, counts = torch.cat(wanted), [len(w) for w in wanted]
        taken = dict.fromkeys(layers), all_wanted.to(self.device) if layers else None
        plan = StepPlan(groups, self._rotation, self._scratch, *taken)
        logits = self._run(tokens, torch.cat(positions), plan, all_wanted)
        if layers:
            self._kept.add(watched, watched_queries(plan.taken, self.watched_heads, self.layout.n_kv_heads), counts)
        for group in groups:
            for member in group.members:
                member.tail.length += member.n - member.refeed
        parts = logits.split(counts)
        return [part for _, part in sorted(zip(ordered, parts, strict=True), key=lambda pair: pair[0])]

    def _member(self, rows: Rows, first: int) -> SequenceRows:
        tail = self._tails[rows.slot]
        n = len(rows.tokens)
        if tail.length + n - rows.refeed > tail.capacity:
            raise ValueError(f"{n} rows do not fit a tail of {tail.capacity} with {tail.length} in use")
        if rows.document is not None:
            rows.document.clear_rest()
        mask = causal_mask(n, tail.length, refeed=rows.refeed, device=self.device)
        return SequenceRows(tail, first, n, rows.refeed, mask)

    def _positions(self, rows: Rows, member: SequenceRows) -> Tensor:
        document = cast("DocumentKV | None", rows.document)
        start = (document.next_position if document else 0) + member.tail.n_own
        positions = torch.arange(start - rows.refeed, start - rows.refeed + member.n)
        if document and rows.refeed:
            positions[0] = document.last_position
        return positions

    def _tail_views(self, slot: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        tail = self._tails[slot]
        if not 0 <= first < last <= tail.length:
            raise ValueError(f"tokens {first} to {last} are not in a tail of {tail.length}")
        return tail.k[:, :, first:last], tail.v[:, :, first:last]

    def _decode(self, records: memoryview, n_tokens: int, k: Tensor, v: Tensor) -> None:
        data = self._on_device(records)
        decode_records(data, n_tokens, self.layout, out_k=k, out_v=v, rotated=self._rotation is not None)

    def _on_device(self, records: memoryview) -> Tensor:
        if not records.nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        writable = bytearray(records) if records.readonly else records
        return torch.frombuffer(writable, dtype=torch.uint8).to(self.device)

    @torch.inference_mode()
    def _run(self, tokens: Sequence[int], positions: Tensor, plan: Plan, wanted: Tensor) -> Tensor:
        """Logits FP32 on the CPU of the rows `wanted`."""
        if self._lean is not None and isinstance(plan, StepPlan) and len(tokens) <= MOST_ROWS:
            return self._lean.logits(torch.tensor(tokens), positions, plan, wanted)
        output = self._model(
            input_ids=torch.tensor([list(tokens)], device=self.device),
            position_ids=positions[None].to(self.device),
            use_cache=False,
            logits_to_keep=wanted.to(self.device),
            plan=plan,
        )
        return output.logits[0].float().cpu()
