"""The memory plan of an engine that computes on the processor: what its process will take at its peak.

Nothing here imports torch. Each line names what it counts, so that one that is off can be traced.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import psutil

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.scratch import Shape
from service.engine.ledger import ALONE, GIB, Beside, CardMemory, Ledger, Line, MemoryPlanRefused
from service.engine.models.card import ModelCard, load_card
from service.engine.models.decoder import read_decoder
from service.engine.models.draft import draft_kv_type
from service.engine.models.weights import TensorSpan, tensor_spans

log = logging.getLogger(__name__)

MIB = 1 << 20
LIBRARIES_NBYTES = 290 * MIB
"""Resident memory of the engine process before a model is loaded: Python, torch's code as it is used, transformers."""
HEAP_NBYTES = 112 * MIB
"""What the allocators keep of memory that was used in between, packed copies of matrices in products, the tokenizer."""
USED_ANEW = 2
"""Memory of a chunk is freed and taken in other sizes: so much more of it stays with the process."""
LIBRARIES = "interpreter and libraries"
CHUNK_TOKENS = 768
FP32_NBYTES = 4
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_JOINED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_CGROUP = Path("/sys/fs/cgroup/memory.max")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class HostWeights:
    """A model's weights: parameters, those of matrices that are joined for few rows, bytes of a weight in the file and
    in compute."""

    n_parameters: int
    joined_params: int
    stored_itemsize: int
    itemsize: int

    @property
    def lines(self) -> list[Line]:
        """Weights of the compute dtype are the file's own pages; joined matrices are copies beside them, after which as
        many pages of the file can go where memory is short. Others are converted, and joining gives back what was
        there."""
        lines = [Line("weights", self.n_parameters * self.itemsize, "load")]
        if self.stored_itemsize == self.itemsize:
            lines.append(Line("weights: joined matrices", self.joined_params * self.itemsize, "file"))
        return lines

    @property
    def passing_nbytes(self) -> int:
        """The stored weights, while they are converted: pages of their files."""
        return 0 if self.stored_itemsize == self.itemsize else self.n_parameters * self.stored_itemsize


@dataclass(frozen=True, slots=True)
class HostSizes:
    """`tail_rows`: that `n_slots` sequences come to use of their tails. `documents_nbytes`: most for documents.
    `restored_tokens`: of a document that comes from disk, which is there twice for a moment; 0 leaves that out."""

    n_slots: int
    tail_rows: int
    documents_nbytes: int
    index_nbytes: int = 0
    chunk_tokens: int = CHUNK_TOKENS
    restored_tokens: int = 0


def joined_parameters(spans: Iterable[TensorSpan]) -> int:
    """Parameters of the matrices that the engine joins for steps of few rows."""
    return sum(prod(span.shape) for span in spans if any(f".{part}." in span.name for part in _JOINED))


def document_layout_nbytes(layout: KVLayout, itemsize: int) -> int:
    """Bytes of a token of a document as the engine holds it: keys in FP32, values in the compute dtype."""
    return layout.n_layers * layout.n_kv_heads * layout.head_dim * (FP32_NBYTES + itemsize)


def host_ledger(
    weights: HostWeights,
    shape: Shape,
    layout: KVLayout,
    sizes: HostSizes,
    memory: CardMemory,
    beside: Beside = ALONE,
) -> Ledger:
    """The plan. `memory.free` is what the machine can still give. `beside`: a draft model, whose documents get as many
    blocks."""
    block = layout.block_tokens * document_layout_nbytes(layout, weights.itemsize)
    one_tail = sizes.tail_rows * document_layout_nbytes(layout, FP32_NBYTES)
    lines = [
        Line("in use already (others)", memory.total - memory.free, "before"),
        Line(LIBRARIES, LIBRARIES_NBYTES + HEAP_NBYTES, "load"),
        *weights.lines,
        *beside.lines,
        Line("tails of sequences", sizes.n_slots * one_tail, "tails"),
        Line("one chunk of prefill", _chunk_work(shape, sizes.chunk_tokens), "work"),
        Line("indexes of windowed documents", sizes.index_nbytes, "work"),
    ]
    if sizes.restored_tokens:
        restored = sizes.restored_tokens * document_layout_nbytes(layout, weights.itemsize)
        lines.append(Line("a document from disk", restored, "work"))
    left = memory.total - sum(line.nbytes for line in lines)
    blocks = max(0, min(left // (block + beside.block_nbytes), sizes.documents_nbytes // block))
    later = blocks * (block + beside.block_nbytes) + sum(
        line.nbytes for line in lines if line.phase in ("tails", "work")
    )
    passing = max(0, weights.passing_nbytes - later)
    lines.append(Line("weights as stored, while they are converted", passing, "file"))
    lines.append(Line("documents", blocks * block, "pool"))
    if beside.block_nbytes:
        lines.append(Line("draft model: documents", blocks * beside.block_nbytes, "pool"))
    return Ledger(tuple(lines), memory, blocks, block, layout.block_tokens, place="memory")


def _chunk_work(shape: Shape, n: int) -> int:
    """Of `n` tokens in FP32: the states, and the larger of attention's tensors and the MLP's."""
    attention = 6 * shape.query_width + 4 * shape.kv_width
    return USED_ANEW * FP32_NBYTES * n * (3 * shape.hidden + max(attention, 3 * shape.intermediate))


def machine_memory() -> CardMemory:
    """Total and available memory of this machine, or of the container where that has less."""
    memory = psutil.virtual_memory()
    limit = _container_limit()
    total = min(memory.total, limit) if limit else memory.total
    return CardMemory(free=min(memory.available, total), total=total)


def _container_limit() -> int:
    try:
        text = _CGROUP.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def free_swap() -> int:
    """Bytes of swap that nobody uses."""
    try:
        rows = (line.split() for line in _MEMINFO.read_text().splitlines())
        return next((int(row[1]) * 1024 for row in rows if row and row[0] == "SwapFree:"), 0)
    except (OSError, ValueError, IndexError):
        return 0


def announce(
    model_dir: Path, card: ModelCard, dtype: str, kv_type: str, sizes: HostSizes, beside: Beside = ALONE
) -> Ledger:
    """The plan of an imported model on this machine as it is now. Raises MemoryPlanRefused, ModelError."""
    ledger = imported_ledger(model_dir, card, dtype, kv_type, sizes, beside)
    check_fits(ledger, free_swap())
    return ledger


def imported_ledger(
    model_dir: Path, card: ModelCard, dtype: str, kv_type: str, sizes: HostSizes, beside: Beside = ALONE
) -> Ledger:
    """The same plan, whether or not it fits."""
    config = vars(read_decoder(model_dir))
    spans = tensor_spans(model_dir)
    weights = HostWeights(card.n_parameters, joined_parameters(spans), ITEMSIZE.get(card.dtype, 2), ITEMSIZE[dtype])
    return host_ledger(weights, Shape.of(config), card.layout(KVType(kv_type)), sizes, machine_memory(), beside)


def draft_beside(draft_dir: Path, dtype: str, kv_type: KVType, sizes: HostSizes) -> Beside:
    """What a draft model takes beside the model's `kv_type`. Raises ModelError."""
    card = load_card(draft_dir)
    own = imported_ledger(draft_dir, card, dtype, draft_kv_type(card, kv_type), sizes)
    return own.beside((LIBRARIES,))


def check_fits(ledger: Ledger, swap_nbytes: int = 0) -> None:
    """Raises MemoryPlanRefused when there is too little memory, `swap_nbytes` of swap included, for the model and one
    block of a document. Tails take theirs only as they are used: a machine on which not all of them could be full is
    not refused."""
    missing = ledger.nbytes("before", "load", "work") + ledger.block_nbytes - ledger.memory.total
    if missing <= 0:
        return
    if missing <= swap_nbytes:
        log.warning("the machine's memory is %.2f GiB short: as much lies in swap, which is slow", missing / GIB)
        return
    raise MemoryPlanRefused(
        f"the model does not fit this machine's memory: {missing / GIB:.2f} GiB are missing before any document. Use a "
        f"smaller one, {'no draft model, ' if ledger.has_draft else ''}fewer answers at once (PREREAD_MAX_BATCH), or "
        "leave more memory free. The plan:\n"
        f"{ledger.table()}"
    )
