"""The memory plan of the llamacpp engine on a processor, made before anything is loaded: all of it is taken at once."""

import logging
from pathlib import Path

from cache_store.layout import KVLayout
from service.engine.exl2_engine.scratch import Shape
from service.engine.ledger import GIB, CardMemory, Ledger, Line, MemoryPlanRefused
from service.engine.llama_engine.sizes import FILL_NBYTES
from service.engine.models.decoder import read_decoder
from service.engine.models.weights import GGUF_NAME
from service.engine.torch_engine.ledger import free_swap, machine_memory

log = logging.getLogger(__name__)

LIBRARIES_NBYTES = 330 << 20
"""Resident memory of the engine process beside llama.cpp's: Python, torch's code as it is used, the tokenizer."""
_F32, _F16 = 4, 2


def llama_ledger(
    weights_nbytes: int,
    shape: Shape,
    layout: KVLayout,
    sizes: tuple[int, int],
    batch: tuple[int, int, int],
    memory: CardMemory,
    max_context: int,
) -> Ledger:
    """The plan. `sizes`: tokens of documents and of tails; `batch`: rows at once, rows with logits, sequences. A
    document of at most `max_context` tokens is put together in memory of its own before it goes to the cache, while
    tails are set aside."""
    n_documents, n_tails = sizes
    n_rows, n_outputs, n_sequences = batch
    work = n_rows * (3 * shape.intermediate + 6 * shape.hidden) + (n_outputs + n_sequences) * shape.vocab
    aside = min(n_documents, max_context) + n_tails
    mask = n_rows * (n_documents + n_tails) * _F16
    lines = (
        Line("in use already (others)", memory.total - memory.free, "before"),
        Line("interpreter and libraries", LIBRARIES_NBYTES, "load"),
        Line("weights", weights_nbytes, "load"),
        Line("tails of sequences", n_tails * layout.bytes_per_token, "tails"),
        Line("one step of rows", work * _F32 + mask, "work"),
        Line("a document from disk, tails", aside * layout.bytes_per_token + FILL_NBYTES, "work"),
        Line("documents", n_documents * layout.bytes_per_token, "pool"),
    )
    block = layout.bytes_per_token * layout.block_tokens
    return Ledger(lines, memory, n_documents // layout.block_tokens, block, layout.block_tokens, place="memory")


def announce(
    model_dir: Path, layout: KVLayout, sizes: tuple[int, int], batch: tuple[int, int, int], max_context: int
) -> Ledger:
    """Say what the engine will take on this machine. Raises MemoryPlanRefused when that is not there."""
    shape = Shape.of(vars(read_decoder(model_dir)))
    nbytes = (model_dir / GGUF_NAME).stat().st_size
    ledger = llama_ledger(nbytes, shape, layout, sizes, batch, machine_memory(), max_context)
    check_fits(ledger, free_swap())
    log.info("the machine's memory:\n%s", ledger.table())
    return ledger


def check_fits(ledger: Ledger, swap_nbytes: int = 0) -> None:
    """Raises MemoryPlanRefused when there is too little memory, `swap_nbytes` of swap included, for all of it."""
    missing = ledger.overdrawn_nbytes + ledger.nbytes("pool")
    if missing > swap_nbytes:
        raise MemoryPlanRefused(
            f"the model and its cache do not fit this machine's memory: {missing / GIB:.2f} GiB are missing. Use less "
            "for documents (PREREAD_RESIDENT_BYTES), fewer answers at once (PREREAD_MAX_BATCH), a smaller model. The "
            "plan:\n"
            f"{ledger.table()}"
        )
