"""The seams around an engine.

``Runner``        a model on a device: prefill chunks, batched forwards, KV in and out. One thread calls it.
``EngineClient``  what the use cases call (async): a supervised child process, or the engine in this process.

Between the two stand the scheduler (continuous batching, sampling, text) and the host (snapshots on disk).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from cache_store.fingerprint import Fingerprint
from cache_store.layout import KVLayout
from cache_store.pieces import Buffers
from service.engine.messages import (
    AnswerEvent,
    AnswerRequest,
    BuildEvent,
    BuildRequest,
    DocumentRef,
    EngineInfo,
    EngineStats,
    ReleaseDone,
)

if TYPE_CHECKING:
    from service.engine.watch.masses import Looks


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """`chunk_tokens`: document prefill runs at fixed boundaries of this many tokens, a multiple of the block size.
    `n_slots`: sequences that can hold a private tail at once. `tail_tokens`: room of one tail."""

    max_context: int
    chunk_tokens: int
    n_slots: int
    tail_tokens: int
    vocab_size: int
    sink_multiple: int = 1
    """A document's sinks are a multiple of this many tokens, so that its segments begin at a block's first row."""
    ragged_slots: bool = False
    """Whether a document may have slots: rows that each head of each layer has for itself, another number in each."""
    draft_tokens: int = 0
    """Guessed tokens of one sequence in a step that are computed for little more than its one token; 0: speculation
    does not pay on this runner."""
    draft_rows: int = 0
    """Rows of a step, those of all sequences together, up to which guessed tokens are computed for little more; 0 for
    no bound beside `draft_tokens`."""
    n_documents: int = 0
    """Documents in memory at once at most, however small; 0 is no bound."""


class Resident(Protocol):
    """A document's KV on the device, shared read-only by every sequence once it is complete.

    Its rows need not be consecutive tokens: keys carry their positions. `next_position` is where the first token behind
    it stands, `last_position` where its last token stands (that of a re-fed row).
    """

    @property
    def n_tokens(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def next_position(self) -> int: ...
    @property
    def last_position(self) -> int: ...


@dataclass(slots=True)
class Rows:
    """The rows one sequence adds to a forward: `tokens` at consecutive positions after its cached ones.

    With `refeed` the first token is the document's last one: its query is computed for its logits, its KV is not
    stored a second time. `logits_from`: index of the first row whose logits are wanted (often the last). `only_best`:
    nobody asks for more than the best token of each of them; with `how_sure` also for its probability.
    """

    slot: int
    document: Any
    tokens: Sequence[int]
    refeed: bool = False
    logits_from: int = 0
    only_best: bool = False
    how_sure: bool = False


@dataclass(frozen=True, slots=True)
class Best:
    """The best token of a row, in place of its logits; the first of equally good ones. `is_finite`: whether all logits
    were. `sure`: its probability, where some row of the step asks `how_sure`, else 0."""

    token_id: int
    is_finite: bool
    sure: float = 0.0


class Waitable(Protocol):
    def wait(self) -> None:
        """Block the calling thread until it is over; from any thread."""
        ...


class HostCopies(Protocol):
    """Documents' KV in host memory, for a runner whose documents live on a device.

    `take`, `give_back` and the sizes are for any thread, the rest for the scheduler's. A document is copied layer by
    layer, the first one first. Copies only begin in a call: a document or a memory must be left as it is until a `mark`
    behind them is over.
    """

    @property
    def used_nbytes(self) -> int: ...

    def nbytes_of(self, n_tokens: int) -> int: ...

    def take(self, n_tokens: int) -> Any | None:
        """Room for a document of `n_tokens` tokens; None when there is not enough."""
        ...

    def give_back(self, memory: Any) -> None: ...

    def copy_out(self, document: Any, memory: Any, layer: int) -> None:
        """Begin copying a layer of a complete document to host memory."""
        ...

    def copy_in(self, memory: Any, document: Any, layer: int) -> None:
        """Begin copying a layer back, into a document of as many tokens made by `new_document`."""
        ...

    def mark(self) -> Waitable:
        """The end of every copy begun so far."""
        ...

    def close(self) -> None: ...


class Runner(Protocol):
    """A model with its weights on a device. Not thread-safe: the scheduler's thread is its only caller.

    Encoded blocks are the bytes of `cache_store.layout` records: one bytes-like object per layer.
    """

    fingerprint: Fingerprint
    layout: KVLayout
    limits: RunnerLimits
    name: str
    compute_dtype: str
    watched_heads: Sequence[tuple[int, int]]
    """KV heads ``(layer, head)`` by which `tail_looks` says where answers look; none where they are not watched. Set
    before the first forward."""

    @property
    def device(self) -> Any:
        """Where it computes, a torch.device."""
        ...

    @property
    def tier(self) -> str:
        """Where documents live: `gpu` or `host`."""
        ...

    @property
    def host_copies(self) -> HostCopies | None:
        """Host memory for documents that have to leave the device; None where there is none."""
        ...

    @property
    def load_buffers(self) -> Buffers | None:
        """Where to read snapshots into for `load_blocks`; None is ordinary memory."""
        ...

    def usable(self) -> bool:
        """Whether the device still answers; asked after an error. False is for good: only a new process helps."""
        ...

    def document_nbytes(self, n_tokens: int, n_slot_rows: int = 0) -> int:
        """Bytes that a document of `n_tokens` tokens takes, as it is counted against the budget for documents;
        `n_slot_rows`: slots of all heads of all layers together."""
        ...

    def new_document(self, n_tokens: int) -> Any:
        """Allocate room for a document of `n_tokens` tokens; it starts empty."""
        ...

    def prepare_document(self, n_tokens: int) -> None:
        """Have memory ready for a document of about `n_tokens` tokens, if that makes `new_document` cheaper. The only
        method that another thread may call."""
        ...

    def prefill_chunk(
        self, document: Any, tokens: Sequence[int], between_layers: Callable[[], None] | None = None
    ) -> list[list[memoryview]]:
        """Compute the next chunk of a document, store it as its decoded form, return its encoded blocks
        (``blocks[i][layer]``). `between_layers` is called after each layer, so that other work can slip in;
        it may raise to cancel, and the document then stays as it was before the chunk."""
        ...

    def load_blocks(self, document: Any, layer: int, first_token: int, records: memoryview, n_tokens: int) -> None:
        """Put consecutive records of one layer (whole blocks, the last may be partial) into a document.

        Copies may go on after the return, from memory of `load_buffers` only; giving that back waits for them.
        """
        ...

    def new_slots(self, document: Any, counts: Sequence[Sequence[int]]) -> None:
        """Make room for slots of a document, ``[n_layers][n_kv_heads]`` of them; `load_slots` of every layer follows,
        then `finish_load`. Every later row attends to the document's rows and, head by head, to the slots. Only where
        `limits.ragged_slots` is set; such a document is not copied by `HostCopies`."""
        ...

    def load_slots(self, document: Any, layer: int, records: memoryview) -> None:
        """Put the slots of one layer into place: its heads' records one after another, as `cache_store.slots` says.
        Raises ValueError when there are not as many as `new_slots` was told."""
        ...

    def finish_load(
        self, document: Any, n_tokens: int, *, next_position: int | None = None, last_position: int | None = None
    ) -> None:
        """Declare the first `n_tokens` rows of a document present in every layer; later calls find them there.

        The positions are those of `Resident`; None stands for consecutive tokens from position 0.
        """
        ...

    def keep_prefix(self, document: Any, n_tokens: int) -> None:
        """Forget all but the first `n_tokens` tokens of a document at consecutive positions: the sinks of the next
        segment. The next chunk goes on there, and chunk boundaries count from there. Raises ValueError when it is no
        multiple of `limits.sink_multiple`."""
        ...

    def replay(
        self,
        document: Any,
        tokens: Sequence[int],
        sinks: int,
        first: int,
        last: int,
        between_layers: Callable[[], None] | None = None,
    ) -> Any:
        """How much a repetition of the tokens [first, last) of a document looks at each of them: `tokens` follow the
        document for once, and attend to its first `sinks` tokens, to [first, last) and causally to themselves; nothing
        is stored. Gives a float32 CPU tensor ``[n_layers, n_kv_heads, last - first]``: the largest
        attention probability over all rows and query heads of a KV head (KVzip, Kim et al., 2025)."""
        ...

    def question_queries(self, rows: Rows, heads: Sequence[tuple[int, int]]) -> Any:
        """Queries of KV heads ``(layer, head)`` for the tokens of `rows`, which are computed for once, as deep as the
        deepest of these layers, and not stored; the tail stays as it is. Gives a float32 tensor on
        `device` ``[len(heads), heads per KV head, len(rows.tokens), head_dim]``: after RoPE, in the space of the stored
        keys, scaled, so that a product with a decoded key is the attention score."""
        ...

    def free_document(self, document: Any) -> None: ...

    def new_tail(self) -> int:
        """Reserve a slot for a sequence's private tail. Raises RuntimeError when none is free."""
        ...

    def free_tail(self, slot: int) -> None: ...

    def tail_length(self, slot: int) -> int: ...

    def truncate_tail(self, slot: int, n_tokens: int) -> None:
        """Forget all but the first `n_tokens` rows of a tail; of a watched one also what was kept of the rows that
        go."""
        ...

    def export_tail(self, slot: int, first: int, last: int) -> list[list[memoryview]]:
        """Encode tokens [first, last) of a tail as blocks of at most `block_tokens` counted from `first`, and
        replace them in place by their decoded form, so that going on equals resuming from the stored bytes."""
        ...

    def import_tail(
        self, slot: int, blocks: Sequence[Sequence[bytes | memoryview]], n_tokens: int, *, fetched: bool = False
    ) -> None:
        """Append stored tokens (as `export_tail` gave them) to a tail.

        `fetched` ones are rows of the document, at positions of their own: later rows attend to them, but they do not
        count for the positions of later rows. A tail has one such run at most; `drop_fetched` takes it out.
        """
        ...

    def drop_fetched(self, slot: int) -> None:
        """Remove a tail's fetched rows; those behind move up and stay as they are. Nothing happens without any."""
        ...

    def watch_tail(self, slot: int) -> None:
        """From now on keep, of every row of this tail whose logits a forward gives, what `tail_looks` needs."""
        ...

    def tail_looks(self, slot: int, document: Any, pieces: Sequence[int]) -> "Looks":
        """Where the last rows of a watched tail looked whose logits were given, as many as `pieces` sum up to: of
        each piece of them. The document and the tail are as they were for the last of these rows. Ends the watch.
        Raises ValueError when fewer were watched."""
        ...

    def forward(self, batch: Sequence[Rows]) -> list[Any]:
        """One step for several sequences. Gives per sequence a float32 CPU tensor
        ``[len(tokens) - logits_from, vocab]``; a runner may give a list of as many `Best` where all rows of the step
        are `only_best`."""
        ...


class EngineClient(Protocol):
    """An engine as the use cases see it. Every iterator ends after one `*Done` or `Failed` event, which is
    also how errors come: these calls do not raise for engine faults. Closing an iterator cancels its request."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def alive(self) -> bool: ...

    def build(self, request: BuildRequest) -> AsyncIterator[BuildEvent]: ...

    def answer(self, request: AnswerRequest) -> AsyncIterator[AnswerEvent]: ...

    async def cancel(self, request_id: str) -> None:
        """Stop a build or an answer at its next step; its iterator ends with `cancelled`. Unknown ids are ignored."""
        ...

    async def release(self, document: DocumentRef) -> ReleaseDone:
        """Drop a document from memory, its running answers and builds included (deletion)."""
        ...

    async def release_session(self, session_id: str) -> None: ...

    async def stats(self) -> EngineStats: ...

    async def check(self) -> float:
        """Decode one token without a document; the milliseconds it took. Raises EngineLost when it cannot."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Attachable(Protocol):
    """What a fleet's client has beside `EngineClient`: answers outlive the process that asked for them."""

    def attach(self, request_id: str) -> AsyncIterator[AnswerEvent]:
        """The events of an answer that any process of the installation began with `answer`, from its first one, then as
        they come; it ends as that iterator does, after AnswerDone or Failed. Can be called by several readers at once,
        also some minutes after the end. All readers of an attempt get the same events, in the same order.

        Of an id that was asked more than once, as after a snapshot miss, it is the latest attempt. Nothing kept of the
        id (never sent, too long ago, or Redis lost it): one `Failed("unknown_request", retryable=True)`. The worker
        was lost: `Failed("engine_lost", retryable=True)` after what came before. Closing this iterator does not cancel
        the answer; `cancel` does, from any process. Does not raise."""
        ...


@runtime_checkable
class OwnDisks(Protocol):
    """What an engine has beside `EngineClient` when snapshots lie on disks that only it reaches."""

    async def delete(self, owner_id: str, snapshots: Sequence[tuple[str, str]]) -> ReleaseDone:
        """Remove snapshots of an owner, pairs of kind and id, from these disks. One that is not reached now does it
        when it is back, and is not counted. Does not raise."""
        ...

    async def pin_only(self, read: Callable[[], Awaitable[Sequence[DocumentRef]]]) -> None:
        """Keep the snapshots of these documents from being evicted from these disks, and no others. `read` gives them,
        and is called once it is known what was kept before. One that is not reached now does it when it is back. Raises
        what `read` raises."""
        ...


def left_running(engine: EngineClient) -> AbstractContextManager[None]:
    """While it lasts, closing an iterator does not cancel its request, where engines outlive this process: another
    process takes it over."""
    detached = getattr(engine, "detached", None)
    return detached() if detached is not None else nullcontext()


def attached(engine: EngineClient, request_id: str) -> AsyncIterator[AnswerEvent] | None:
    """`Attachable.attach`; None where an engine belongs to one process."""
    attach = getattr(engine, "attach", None)
    return attach(request_id) if attach is not None else None


class EngineLost(Exception):
    """The engine process is not there, or did not answer in time."""
