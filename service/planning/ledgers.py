"""The memory plan by the engine's own rules: on a card those of the exl2 engine, else those of the torch engine."""

from service.engine.exl2_engine.graph_sizes import CONTEXTS, step_rows
from service.engine.exl2_engine.ledger import PORTABLE_NBYTES, Sizes, ledger_of
from service.engine.ledger import CardMemory, Ledger
from service.engine.torch_engine.ledger import ITEMSIZE, HostSizes, HostWeights, document_layout_nbytes, host_ledger
from service.planning.cards import FIRST_TRITON, Card
from service.planning.model import ModelFacts
from service.planning.request import INDEX_NBYTES, Wanted, layout_of

CONTEXT_NBYTES = 512 << 20
"""What CUDA's context takes of a card when a process makes one."""
EXL2_ROPE_ROWS = 256
EXL2_DQ_STEP = 128


def plan_ledger(model: ModelFacts, card: Card, wanted: Wanted) -> Ledger:
    """The lines of memory of this model as it would be served, with what is left for documents."""
    return _on_processor(model, card, wanted) if card.is_cpu else _on_card(model, card, wanted)


def read_nbytes(model: ModelFacts, card: Card, wanted: Wanted) -> int:
    """Bytes of a document's token that a decode step reads: on a card as stored, else as the torch engine holds it."""
    layout = layout_of(model.shape, wanted.kv_type)
    return document_layout_nbytes(layout, ITEMSIZE[wanted.compute]) if card.is_cpu else layout.bytes_per_token


def step_nbytes(model: ModelFacts, card: Card, wanted: Wanted) -> int:
    """Bytes of weights that a decode step reads."""
    if not card.is_cpu or model.kind == "dimensions":
        return model.step_nbytes
    rows = sum(model.footprint.embedding) if sum(model.footprint.head) else 0  # of which a step needs some rows only
    return (model.n_parameters - rows // 2) * ITEMSIZE[wanted.compute]


def _on_card(model: ModelFacts, card: Card, wanted: Wanted) -> Ledger:
    shape = model.shape
    widest = max(shape.hidden, shape.intermediate, shape.query_width)
    rows = tuple(step_rows(wanted.users, 0, shape.n_heads // shape.n_kv_heads))  # guesses only where asked for
    sizes = Sizes(
        max_context=wanted.room_tokens,
        n_slots=wanted.n_slots,
        tail_tokens=wanted.tail_tokens,
        rope_rows=EXL2_ROPE_ROWS,
        max_dq_elements=model.footprint.largest_matrix + EXL2_DQ_STEP * widest,
        graph_rows=rows if _captures(card) else (),
        graph_contexts=len(CONTEXTS) + 2,
        portable_nbytes=0 if _captures(card) else PORTABLE_NBYTES,
        index_nbytes=INDEX_NBYTES if wanted.is_windowed or (model.kind != "dimensions" and model.index_heads) else 0,
        reserve_nbytes=wanted.reserve_nbytes,
    )
    free = max(0, card.free_nbytes - CONTEXT_NBYTES)
    memory = CardMemory(free=free, total=card.memory_nbytes)
    return ledger_of(shape, model.footprint, layout_of(shape, wanted.kv_type), sizes, memory)


def _captures(card: Card) -> bool:
    """Attention in plain torch, below sm_80, does not go into a CUDA graph (`KVBackend.can_be_captured`)."""
    return card.capability is None or card.capability >= FIRST_TRITON


def _on_processor(model: ModelFacts, card: Card, wanted: Wanted) -> Ledger:
    itemsize = ITEMSIZE[wanted.compute]
    weights = HostWeights(model.n_parameters, model.joined_params, model.stored_itemsize or itemsize, itemsize)
    layout = layout_of(model.shape, wanted.kv_type)
    documents = max(wanted.room_tokens * document_layout_nbytes(layout, itemsize), wanted.resident_nbytes)
    sizes = HostSizes(wanted.users, wanted.tail_tokens, documents)
    return host_ledger(weights, model.shape, layout, sizes, CardMemory(card.free_nbytes, card.memory_nbytes))
