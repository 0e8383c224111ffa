"""The memory plan of a card, made before anything is loaded: named lines in bytes, and what is left for documents.

Whoever loads a model announces this plan, allocates the block pool by it, and can compare it with what was measured
(`meter.py`). A context that cannot fit is refused here, with the plan in the message.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cache_store.layout import KVLayout
from service.engine.exl2_engine.footprint import MIB, Footprint, reserved_nbytes, weights_footprint
from service.engine.exl2_engine.scratch import (
    Shape,
    exllama_scratch,
    logits_work,
    past_piece,
    replay_work,
    rope_table,
    step_work,
)
from service.engine.fetch.index import SCORING_NBYTES
from service.engine.models.errors import ModelError
from service.engine.models.weights import TensorSpan

GIB = 1 << 30
LIBRARIES_NBYTES = 512 * MIB
"""What CUDA takes beside torch's allocator once everything ran: code of exllamav2, cuBLAS, cuDNN and Triton as it is
loaded. The context itself exists when the plan is made."""
WORKSPACES_NBYTES = 2 * 32 * MIB
"""Workspace of cuBLAS, one for each stream that multiplies: that of the engine and that of the captures."""
GRAPH_NBYTES = 4 * MIB
"""What the driver keeps for one captured decode step, beside its buffers."""
TAIL_PARTS = 8
"""Most pieces that a tail is cut into (`kernels.attend`)."""
DOCUMENT_PARTS = 128
"""Most pieces that a document is cut into for a few rows; more rows need fewer."""
RESERVE_NBYTES = GIB
"""Left free: rounding of the allocator, and other users of the card."""


class MemoryPlanRefused(ModelError):
    """The model, or a context of the wanted length, does not fit the card; the message has the plan."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an operator chose, and what the engine is built with.

    `pool_nbytes`: most that documents may take; None is all that is left. `chunk_tokens`: of document prefill, also
    exllamav2's `max_input_len`. `rope_rows`: length of exllamav2's own RoPE tables. `piece_tokens`: of the past decoded
    at a time in prefill. `replay_scores`: scores of a repetition at a time. `import_nbytes`: records on their way
    into a tail at a time. `max_dq_elements`: exllamav2's `max_dq_size`. `logit_rows`: most rows whose logits one
    forward gives. `graph_rows`: rows of the captured decode steps, each captured for `graph_contexts` lengths.
    `index_nbytes`: of the indexes of windowed documents, if the model has heads for them.
    """

    max_context: int
    n_slots: int
    tail_tokens: int
    pool_nbytes: int | None = None
    chunk_tokens: int = 2048
    rope_rows: int = 2048
    piece_tokens: int = 16384
    replay_scores: int = 1 << 25
    import_nbytes: int = 32 * MIB
    max_dq_elements: int = 512 * MIB
    logit_rows: int = 256
    graph_rows: tuple[int, ...] = (1, 2, 4, 8)
    graph_contexts: int = 3
    share_head: bool = True
    tail_itemsize: int = 2
    index_nbytes: int = 0
    reserve_nbytes: int = RESERVE_NBYTES


@dataclass(frozen=True, slots=True)
class CardMemory:
    """`torch.cuda.mem_get_info`, with the context of this process already made: free and total bytes."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Line:
    """One entry. `phase`: when it appears: `before`, `load`, `tails`, `pool`, `work`, or `never` (the reserve)."""

    name: str
    nbytes: int
    phase: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """The plan. `pool_blocks` blocks of `block_nbytes` (over all layers) hold documents' KV."""

    lines: tuple[Line, ...]
    memory: CardMemory
    pool_blocks: int
    block_nbytes: int
    block_tokens: int

    def nbytes(self, *phases: str) -> int:
        """Bytes of the lines of these phases."""
        return sum(line.nbytes for line in self.lines if line.phase in phases)

    @property
    def announced_nbytes(self) -> int:
        """What this process will use at its peak, beside the context it had when the plan was made."""
        return self.nbytes("load", "tails", "pool", "work")

    @property
    def pool_tokens(self) -> int:
        return self.pool_blocks * self.block_tokens

    def table(self) -> str:
        """The lines as text, in GiB."""
        rows = [(line.name, f"{line.nbytes / GIB:9.3f} GiB") for line in self.lines]
        rows.append(("card", f"{self.memory.total / GIB:9.3f} GiB"))
        width = max(len(name) for name, _ in rows)
        text = "\n".join(f"  {name:<{width}} {size}" for name, size in rows)
        blocks = f"{self.pool_blocks:,} blocks of {self.block_tokens} tokens"
        return f"{text}\n  {blocks}: {self.pool_tokens:,} tokens of documents"


def plan_memory(
    spans: Sequence[TensorSpan],
    config: dict[str, Any],
    layout: KVLayout,
    sizes: Sizes,
    memory: CardMemory,
    *,
    require_context: bool = True,
) -> Ledger:
    """The plan for a model directory's tensors (`tensor_spans`) and `config.json`.

    Raises MemoryPlanRefused when a document of `sizes.max_context` tokens does not fit what is left; with
    `require_context` false only when not even one chunk does.
    """
    shape = Shape.of(config)
    footprint = weights_footprint(spans, share_head=sizes.share_head)
    lines = [
        Line("in use already (context, others)", memory.total - memory.free, "before"),
        *_load_lines(shape, footprint, sizes),
        Line("tails", _tails_nbytes(layout, sizes), "tails"),
        *_work_lines(shape, footprint, layout, sizes),
        Line("reserve", sizes.reserve_nbytes, "never"),
    ]
    left = memory.total - sum(line.nbytes for line in lines)
    block_nbytes = layout.record_nbytes(layout.block_tokens) * layout.n_layers
    table_nbytes = layout.n_layers * layout.n_kv_heads * 2 * 4
    room = (left - 24 * MIB) // (block_nbytes + table_nbytes) * block_nbytes
    blocks = max(0, room if sizes.pool_nbytes is None else min(room, sizes.pool_nbytes)) // block_nbytes
    pool = reserved_nbytes([blocks * block_nbytes, blocks * table_nbytes])
    lines.insert(-1, Line("documents (block pool)", pool, "pool"))
    ledger = Ledger(tuple(lines), memory, blocks, block_nbytes, layout.block_tokens)
    wanted = sizes.max_context if require_context else min(sizes.chunk_tokens, sizes.max_context)
    if ledger.pool_tokens < wanted:
        raise MemoryPlanRefused(_refusal(ledger, layout, wanted, left))
    return ledger


def _load_lines(shape: Shape, footprint: Footprint, sizes: Sizes) -> list[Line]:
    parts = {"layers": footprint.layers, "embedding": footprint.embedding, "head": footprint.head}
    weights = [Line(f"weights: {name}", sum(tensors), "load") for name, tensors in parts.items()]
    together = reserved_nbytes(t for tensors in parts.values() for t in tensors)
    scratch = exllama_scratch(shape, footprint, sizes.chunk_tokens, sizes.max_dq_elements)
    tables = rope_table(sizes.rope_rows, shape.head_dim)
    return [
        *weights,
        Line("weights: rounding of the allocator", together - sum(line.nbytes for line in weights), "load"),
        Line("exllamav2's scratch", reserved_nbytes([scratch, tables]) if scratch else 0, "load"),
    ]


def _work_lines(shape: Shape, footprint: Footprint, layout: KVLayout, sizes: Sizes) -> list[Line]:
    quantized, n_graphs = footprint.quantized, len(sizes.graph_rows) * sizes.graph_contexts
    scratch = layout.record_nbytes(layout.block_tokens) * layout.n_blocks(sizes.tail_tokens)
    scratch += max(sizes.import_nbytes, scratch)
    prefill = replay_work(shape, quantized, sizes.chunk_tokens, sizes.replay_scores, layout.block_tokens)
    question = step_work(shape, quantized, sizes.tail_tokens, TAIL_PARTS + 2) + logits_work(shape, sizes.logit_rows)
    widest = max((*sizes.graph_rows, 1))
    captured = step_work(shape, quantized, widest, TAIL_PARTS + DOCUMENT_PARTS) if n_graphs else 0
    outputs = sum(logits_work(shape, rows) for rows in sizes.graph_rows) * sizes.graph_contexts
    scoring = SCORING_NBYTES if sizes.index_nbytes else 0
    return [
        Line("indexes of windowed documents", sizes.index_nbytes, "work"),
        Line("one chunk or one long question", max(prefill, question, scoring), "work"),
        Line("decoded past of a chunk", past_piece(shape, sizes.piece_tokens) + scratch, "work"),
        Line("captured decode steps", captured + outputs + n_graphs * GRAPH_NBYTES, "work"),
        Line("workspaces of cuBLAS", WORKSPACES_NBYTES, "work"),
        Line("code and libraries", LIBRARIES_NBYTES, "work"),
    ]


def _tails_nbytes(layout: KVLayout, sizes: Sizes) -> int:
    one = 2 * layout.n_kv_heads * layout.head_dim * sizes.tail_itemsize * layout.n_layers
    return sizes.n_slots * sizes.tail_tokens * one


def _refusal(ledger: Ledger, layout: KVLayout, wanted: int, left: int) -> str:
    if left <= 0:
        what = f"the model does not fit the card: {-left / GIB:.2f} GiB are missing before any document"
    else:
        what = f"a context of {wanted:,} tokens does not fit the card, only one of {ledger.pool_tokens:,}"
    return (
        f"{what}. Lower the context (PREREAD_MAX_CONTEXT), the answers at once (PREREAD_MAX_BATCH), or choose a "
        f"smaller KV type than {layout.kv_type} (PREREAD_KV_TYPE) or model. The plan:\n{ledger.table()}"
    )
