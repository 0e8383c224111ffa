"""Plans for the llamacpp engine: a GGUF as it lies, on a processor or whole on a card.

On a processor the rules are the engine's own. On a card llama.cpp takes its memory by itself: those lines follow its
code, and were never held against a card.
"""

from collections.abc import Iterator
from dataclasses import replace

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.footprint import Footprint
from service.engine.exl2_engine.scratch import Shape
from service.engine.ledger import CardMemory, Ledger, Line
from service.engine.llama_engine.ledger import llama_ledger
from service.engine.llama_engine.sizes import N_DOCUMENTS, N_OUTPUTS, N_OWN, N_ROWS
from service.planning.cards import CONTEXT_NBYTES, FIRST_EXL2, Card
from service.planning.model import ModelFacts
from service.planning.request import Wanted, layout_of

FILE_BITS = {"Q8_0": 8.5, "Q6_K": 6.6, "Q5_K_M": 5.7, "Q4_K_M": 4.9, "Q3_K_M": 4.0}
"""Bits of a weight, scales included, of the types that GGUF files mostly come in."""
MARGIN_NBYTES = 512 << 20
"""Left free on a card, where none of this was measured."""
_F16, _F32 = 2, 4
_VOLTA = (7, 0), (7, 5)
_FIRST_DP4A = (6, 1)
_ALL_KERNELS = "keys and values of different types (k8v4) need a build with -DGGML_CUDA_FA_ALL_QUANTS=on"


def as_file(model: ModelFacts) -> ModelFacts:
    """The same model as llama.cpp holds it: the weights of the file, of which a step reads all but an input embedding
    that is no head. On a card that embedding stays in the machine's memory."""
    if model.kind == "dimensions":
        return replace(model, card_problems=())
    step = file_step_nbytes(model)
    bits = 8 * model.stored_nbytes / model.n_parameters
    label = f"GGUF of {bits:.2f} bits, as it is" if model.kind == "gguf" else model.label
    footprint = Footprint((step,), (), (), 0, 0)
    problems = model.file_problems if model.kind == "gguf" else model.problems
    return replace(model, bits=bits, label=label, footprint=footprint, problems=problems, card_problems=(), notes=())


def file_step_nbytes(model: ModelFacts) -> int:
    """Bytes of a GGUF that a decode step reads: of an embedding that is no head some rows only."""
    rows = sum(model.footprint.embedding) // 2 if sum(model.footprint.head) else 0
    return round(model.stored_nbytes * (1 - rows / model.n_parameters))


def file_refusals(model: ModelFacts, card: Card, wanted: Wanted) -> Iterator[str]:
    """Why llama.cpp, or this engine over it, does not serve that, whatever the memory."""
    if model.kind in ("exl2", "gptq"):
        old = card.capability is not None and card.capability < FIRST_EXL2
        other = f", and the exl2 engine needs sm_70 or newer ({card.name} is of {card.architecture})" if old else ""
        yield f"llama.cpp does not read {model.label} weights{other}: take a GGUF of the model"
    if model.kind == "plain":
        yield (
            "llama.cpp reads GGUF files alone: make one (its convert_hf_to_gguf.py and llama-quantize), or take one, "
            "and import it with --engine llamacpp"
        )
    if wanted.is_windowed:
        yield "the llamacpp engine keeps documents whole: take --retention full"
    if wanted.draft is not None:
        yield "the llamacpp engine guesses no tokens: leave --draft-model out"
    if wanted.documents > N_DOCUMENTS:
        yield f"the llamacpp engine holds at most {N_DOCUMENTS} documents at a time"


def file_notes(model: ModelFacts, card: Card, wanted: Wanted, ledger: Ledger) -> Iterator[str]:
    """What to set, and what is not known."""
    if ledger.pool_tokens >= wanted.room_tokens:
        room = f"PREREAD_RESIDENT_BYTES={ledger.nbytes('pool')}"
        yield f"memory for documents is taken at the start, whatever is asked: serve it with {room}, or with less"
    if model.kind != "gguf":
        types = ", ".join(f"{name} {bits:g}" for name, bits in FILE_BITS.items())
        yield f"bits of a weight in GGUF files, about: {types}"
    if card.is_cpu:
        return
    yield "the llamacpp engine was never run on a card: what llama.cpp takes there beside weights and KV is reasoned"
    if wanted.kv_type.key_bits != wanted.kv_type.value_bits:
        yield f"on a card {_ALL_KERNELS}"


def file_ledger(model: ModelFacts, card: Card, wanted: Wanted) -> Ledger:
    """The plan with room for the documents that are asked for, or for as many tokens as there is memory for."""
    step = layout_of(model.shape, wanted.kv_type).block_tokens
    fitting, most = 0, wanted.room_tokens // step
    if _left(whole := _ledger(model, card, wanted, most * step)) >= 0:
        return whole
    while most - fitting > 1:
        middle = (fitting + most) // 2
        if _left(_ledger(model, card, wanted, middle * step)) >= 0:
            fitting = middle
        else:
            most = middle
    return _ledger(model, card, wanted, fitting * step)


def missing_nbytes(model: ModelFacts, card: Card, wanted: Wanted) -> int:
    """Of memory for all documents that are asked for."""
    step = layout_of(model.shape, wanted.kv_type).block_tokens
    return max(0, -_left(_ledger(model, card, wanted, wanted.room_tokens // step * step)))


def _left(ledger: Ledger) -> int:
    return -ledger.overdrawn_nbytes - ledger.nbytes("pool")


def _ledger(model: ModelFacts, card: Card, wanted: Wanted, n_documents: int) -> Ledger:
    layout = layout_of(model.shape, wanted.kv_type)
    sizes = n_documents, wanted.n_slots * (wanted.tail_tokens + 1)
    if not card.is_cpu:
        return _on_card(model, card, wanted, layout, sizes)
    batch = N_ROWS, N_OUTPUTS, N_OWN + N_DOCUMENTS + wanted.n_slots
    memory = CardMemory(card.free_nbytes, card.memory_nbytes)
    return llama_ledger(
        model.stored_nbytes, model.shape, layout, sizes, batch, memory, model.max_context or wanted.context
    )


def _on_card(model: ModelFacts, card: Card, wanted: Wanted, layout: KVLayout, sizes: tuple[int, int]) -> Ledger:
    n_documents, n_tails = sizes
    memory = CardMemory(max(0, card.free_nbytes - CONTEXT_NBYTES), card.memory_nbytes)
    lines = (
        Line("in use already (others, CUDA context)", memory.total - memory.free, "before"),
        Line("weights", model.weights_nbytes, "load"),
        Line("tails of sequences", n_tails * layout.bytes_per_token, "tails"),
        Line("one step of rows", _step_nbytes(model.shape, sum(sizes)), "work"),
        Line("a layer's keys and values in FP16", _expanded_nbytes(model.shape, wanted.kv_type, sum(sizes)), "work"),
        Line("a matrix in FP16, for its products", _matrix_nbytes(model.shape, card), "work"),
        Line("margin", MARGIN_NBYTES, "never"),
        Line("documents", n_documents * layout.bytes_per_token, "pool"),
    )
    block = layout.bytes_per_token * layout.block_tokens
    taken = tuple(line for line in lines if line.nbytes)
    return Ledger(taken, memory, n_documents // layout.block_tokens, block, layout.block_tokens)


def _step_nbytes(shape: Shape, n_cells: int) -> int:
    """States of `N_ROWS` rows, the logits of some, and the mask of what each row sees, in FP32 and in FP16."""
    rows = N_ROWS * (3 * shape.intermediate + 6 * shape.hidden) + N_OUTPUTS * shape.vocab
    return _F32 * rows + (_F32 + _F16) * N_ROWS * n_cells


def _expanded_nbytes(shape: Shape, kv_type: KVType, n_cells: int) -> int:
    """llama.cpp's attention over many rows reads FP16: quantized keys and values of a layer are expanded first."""
    return 0 if kv_type == KVType.FP16 else 2 * _F16 * n_cells * shape.kv_width


def _matrix_nbytes(shape: Shape, card: Card) -> int:
    """Of products with many rows on Volta and on what is older than sm_61: others multiply quantized weights as they
    are."""
    largest = shape.hidden * max(shape.intermediate, shape.vocab)
    capability = card.capability or _VOLTA[1]
    expands = capability < _FIRST_DP4A or _VOLTA[0] <= capability < _VOLTA[1]
    return _F16 * largest if expands else 0
