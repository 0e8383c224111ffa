"""The memory plan by the engine's own rules: on a card those of the exl2 engine, else those of the torch engine."""

from dataclasses import replace

from cache_store.layout import KVType
from service.engine.exl2_engine.graph_sizes import CONTEXTS, DRAFT_TOKENS, step_rows
from service.engine.exl2_engine.ledger import LIBRARIES as ON_CARD
from service.engine.exl2_engine.ledger import PORTABLE_NBYTES, Sizes, block_table_nbytes, ledger_of
from service.engine.ledger import ALONE, Beside, CardMemory, Ledger
from service.engine.torch_engine.ledger import ITEMSIZE, HostSizes, HostWeights, document_layout_nbytes, host_ledger
from service.engine.torch_engine.ledger import LIBRARIES as ON_PROCESSOR
from service.planning.cards import CONTEXT_NBYTES, FIRST_TRITON, Card
from service.planning.llama import file_ledger
from service.planning.model import ModelFacts
from service.planning.request import INDEX_NBYTES, Wanted, layout_of

EXL2_ROPE_ROWS = 256
EXL2_DQ_STEP = 128


def plan_ledger(model: ModelFacts, card: Card, wanted: Wanted) -> Ledger:
    """The lines of memory of this model as it would be served, with what is left for documents."""
    if wanted.by_llama:
        return file_ledger(model, card, wanted)
    return _on_processor(model, card, wanted) if card.is_cpu else _on_card(model, card, wanted)


def read_nbytes(model: ModelFacts, card: Card, wanted: Wanted) -> int:
    """Bytes of a document's token that a decode step reads: as stored, but as the torch engine holds it."""
    layout = layout_of(model.shape, wanted.kv_type)
    by_torch = card.is_cpu and not wanted.by_llama
    return document_layout_nbytes(layout, ITEMSIZE[wanted.compute]) if by_torch else layout.bytes_per_token


def step_nbytes(model: ModelFacts, card: Card, wanted: Wanted) -> int:
    """Bytes of weights that a decode step reads."""
    if not card.is_cpu or wanted.by_llama or model.kind == "dimensions":
        return model.step_nbytes
    rows = sum(model.footprint.embedding) if sum(model.footprint.head) else 0  # of which a step needs some rows only
    return (model.n_parameters - rows // 2) * ITEMSIZE[wanted.compute]


def _on_card(model: ModelFacts, card: Card, wanted: Wanted) -> Ledger:
    drafted, beside = DRAFT_TOKENS if wanted.guesses else 0, ALONE
    if wanted.draft is not None:
        beside = _draft_on_card(wanted.draft, card, wanted)
    index = wanted.is_windowed or (model.kind != "dimensions" and model.index_heads)
    sizes = _sizes(model, card, wanted, drafted, wanted.n_slots, INDEX_NBYTES if index else 0)
    free = max(0, card.free_nbytes - CONTEXT_NBYTES)
    memory = CardMemory(free=free, total=card.memory_nbytes)
    return ledger_of(model.shape, model.footprint, layout_of(model.shape, wanted.kv_type), sizes, memory, beside)


def _draft_on_card(draft: ModelFacts, card: Card, wanted: Wanted) -> Beside:
    layout = layout_of(draft.shape, _kv_type(draft, wanted))
    sizes = _sizes(draft, card, wanted, DRAFT_TOKENS, wanted.draft_slots, 0)
    own = ledger_of(draft.shape, draft.footprint, layout, replace(sizes, reserve_nbytes=0), CardMemory(0, 0))
    return own.beside((ON_CARD,), block_table_nbytes(layout))


def _kv_type(draft: ModelFacts, wanted: Wanted) -> KVType:
    """As the engine chooses it (`models.draft.draft_kv_type`); the model's where nothing was measured yet."""
    return wanted.kv_type if draft.allowed_kv is None or wanted.kv_type in draft.allowed_kv else KVType.FP16


def _sizes(model: ModelFacts, card: Card, wanted: Wanted, drafted: int, n_slots: int, index_nbytes: int) -> Sizes:
    shape = model.shape
    widest = max(shape.hidden, shape.intermediate, shape.query_width)
    rows = tuple(step_rows(wanted.users, drafted, shape.n_heads // shape.n_kv_heads))
    return Sizes(
        max_context=wanted.room_tokens,
        n_slots=n_slots,
        tail_tokens=wanted.tail_tokens,
        rope_rows=EXL2_ROPE_ROWS,
        max_dq_elements=model.footprint.largest_matrix + EXL2_DQ_STEP * widest,
        graph_rows=rows if _captures(card) else (),
        graph_contexts=len(CONTEXTS) + 2,
        portable_nbytes=0 if _captures(card) else PORTABLE_NBYTES,
        index_nbytes=index_nbytes,
        reserve_nbytes=wanted.reserve_nbytes,
    )


def _captures(card: Card) -> bool:
    """Attention in plain torch, below sm_80, does not go into a CUDA graph (`KVBackend.can_be_captured`)."""
    return card.capability is None or card.capability >= FIRST_TRITON


def _on_processor(model: ModelFacts, card: Card, wanted: Wanted) -> Ledger:
    layout, memory = layout_of(model.shape, wanted.kv_type), CardMemory(card.free_nbytes, card.memory_nbytes)
    documents = wanted.room_tokens * document_layout_nbytes(layout, ITEMSIZE[wanted.compute])
    sizes = HostSizes(
        wanted.users, wanted.tail_tokens, max(documents, wanted.resident_nbytes), restored_tokens=wanted.rows
    )
    beside = ALONE
    if (draft := wanted.draft) is not None:
        own_layout, own_sizes = (
            layout_of(draft.shape, _kv_type(draft, wanted)),
            replace(sizes, documents_nbytes=0, restored_tokens=0),
        )
        own = host_ledger(_weights(draft, wanted), draft.shape, own_layout, own_sizes, memory)
        beside = own.beside((ON_PROCESSOR,))
    return host_ledger(_weights(model, wanted), model.shape, layout, sizes, memory, beside)


def _weights(model: ModelFacts, wanted: Wanted) -> HostWeights:
    itemsize = ITEMSIZE[wanted.compute]
    return HostWeights(model.n_parameters, model.joined_params, model.stored_itemsize or itemsize, itemsize)
