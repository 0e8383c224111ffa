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
from service.engine.fetch.sizes import SCORING_NBYTES
from service.engine.ledger import ALONE, GIB, Beside, CardMemory, Ledger, Line, MemoryPlanRefused
from service.engine.models.weights import TensorSpan

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
PORTABLE_NBYTES = 256 * MIB
"""Scratch of attention without Triton, where steps are not captured: keys, values and scores in FP32, as
`portable_attend` bounds them, and what they are decoded through. Counted, not measured on a card."""
LIBRARIES = "code and libraries"
RESERVE_NBYTES = GIB
"""Left free: rounding of the allocator, and other users of the card."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an operator chose, and what the engine is built with.

    `pool_nbytes`: most that documents may take; None is all that is left. `chunk_tokens`: of document prefill, also
    exllamav2's `max_input_len`. `rope_rows`: length of exllamav2's own RoPE tables. `piece_tokens`: of the past decoded
    at a time in prefill. `replay_scores`: scores of a repetition at a time. `import_nbytes`: records on their way
    into a tail at a time. `max_dq_elements`: exllamav2's `max_dq_size`. `logit_rows`: most rows whose logits one
    forward gives. `graph_rows`: rows of the captured decode steps, each captured for `graph_contexts` lengths.
    `portable_nbytes`: of scratch, where attention is plain torch.
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
    portable_nbytes: int = 0
    share_head: bool = True
    tail_itemsize: int = 2
    index_nbytes: int = 0
    reserve_nbytes: int = RESERVE_NBYTES


def plan_memory(
    spans: Sequence[TensorSpan],
    config: dict[str, Any],
    layout: KVLayout,
    sizes: Sizes,
    memory: CardMemory,
    *,
    require_context: bool = True,
    beside: Beside = ALONE,
) -> Ledger:
    """The plan for a model directory's tensors (`tensor_spans`) and `config.json`, with a draft model `beside` it.

    Raises MemoryPlanRefused when a document of `sizes.max_context` tokens does not fit what is left; with
    `require_context` false only when not even one chunk does.
    """
    footprint = weights_footprint(spans, share_head=sizes.share_head)
    ledger = ledger_of(Shape.of(config), footprint, layout, sizes, memory, beside)
    wanted = sizes.max_context if require_context else min(sizes.chunk_tokens, sizes.max_context)
    if problem := shortage(ledger, layout, wanted):
        raise MemoryPlanRefused(problem)
    return ledger


def ledger_of(
    shape: Shape,
    footprint: Footprint,
    layout: KVLayout,
    sizes: Sizes,
    memory: CardMemory,
    beside: Beside = ALONE,
) -> Ledger:
    """The plan, whether or not anything is left for documents (`shortage` says). `beside`: a draft model, whose
    documents get as many blocks."""
    lines = [
        Line("in use already (context, others)", memory.total - memory.free, "before"),
        *beside.lines,
        *_load_lines(shape, footprint, sizes),
        Line("tails", _tails_nbytes(layout, sizes), "tails"),
        *_work_lines(shape, footprint, layout, sizes),
        Line("reserve", sizes.reserve_nbytes, "never"),
    ]
    left = memory.total - sum(line.nbytes for line in lines)
    block_nbytes = layout.record_nbytes(layout.block_tokens) * layout.n_layers
    table_nbytes = block_table_nbytes(layout)
    room = (left - 24 * MIB) // (block_nbytes + table_nbytes + beside.block_nbytes) * block_nbytes
    blocks = max(0, room if sizes.pool_nbytes is None else min(room, sizes.pool_nbytes)) // block_nbytes
    pool = reserved_nbytes([blocks * block_nbytes, blocks * table_nbytes])
    lines.insert(-1, Line("documents (block pool)", pool, "pool"))
    if beside.block_nbytes:
        lines.insert(-1, Line("draft model: documents", reserved_nbytes([blocks * beside.block_nbytes]), "pool"))
    return Ledger(tuple(lines), memory, blocks, block_nbytes, layout.block_tokens)


def block_table_nbytes(layout: KVLayout) -> int:
    """Of a block's entries in the table of slots."""
    return layout.n_layers * layout.n_kv_heads * 2 * 4


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
        Line("attention in plain torch", sizes.portable_nbytes, "work"),
        Line("workspaces of cuBLAS", WORKSPACES_NBYTES, "work"),
        Line(LIBRARIES, LIBRARIES_NBYTES, "work"),
    ]


def _tails_nbytes(layout: KVLayout, sizes: Sizes) -> int:
    one = 2 * layout.n_kv_heads * layout.head_dim * sizes.tail_itemsize * layout.n_layers
    return sizes.n_slots * sizes.tail_tokens * one


def shortage(ledger: Ledger, layout: KVLayout, wanted: int) -> str:
    """Why `wanted` tokens of documents do not fit, with the plan and what could be lowered; "" when they do."""
    if ledger.pool_tokens >= wanted:
        return ""
    if (missing := ledger.overdrawn_nbytes) > 0:
        what = f"the model does not fit the card: {missing / GIB:.2f} GiB are missing before any document"
    else:
        what = f"a context of {wanted:,} tokens does not fit the card, only one of {ledger.pool_tokens:,}"
    without = "leave out the draft model (PREREAD_DRAFT_MODEL), " if ledger.has_draft else ""
    return (
        f"{what}. Lower the context (PREREAD_MAX_CONTEXT), the answers at once (PREREAD_MAX_BATCH), {without}or choose "
        f"a smaller KV type than {layout.kv_type} (PREREAD_KV_TYPE) or model. The plan:\n{ledger.table()}"
    )
