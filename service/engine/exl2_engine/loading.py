"""Makes a runner: memory planned, weights loaded, tails and pool allocated, decode steps captured, in that order."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.backends import Choice, select_backend
from service.engine.exl2_engine.cards import check_card
from service.engine.exl2_engine.exllama_loading import ROPE_ROWS
from service.engine.exl2_engine.few_rows import ProductChoice
from service.engine.exl2_engine.footprint import weights_footprint
from service.engine.exl2_engine.graph_sizes import CONTEXTS, DRAFT_ROWS, step_rows
from service.engine.exl2_engine.graphs import CudaCapture, DecodeGraphs
from service.engine.exl2_engine.ledger import PORTABLE_NBYTES, RESERVE_NBYTES, Sizes, plan_memory
from service.engine.exl2_engine.model import DecoderModel
from service.engine.exl2_engine.pool import BlockPool, block_nbytes
from service.engine.exl2_engine.prefill_attention import PIECE_TOKENS
from service.engine.exl2_engine.replay import SCORES
from service.engine.exl2_engine.runner import CHUNK_TOKENS, HEAD_ROWS, Exl2Runner
from service.engine.exl2_engine.tail_records import IMPORT_NBYTES
from service.engine.exl2_engine.tails import Tails
from service.engine.exl2_engine.warming import warm_up
from service.engine.ledger import ALONE, Beside, CardMemory, Ledger
from service.engine.models.card import ModelCard, check_engine, check_kv_type, load_card
from service.engine.models.decoder import read_decoder
from service.engine.models.errors import EngineRefused
from service.engine.models.weights import tensor_spans

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """What an operator chose. `max_context` 0 is the model's own, as much of it as fits. `pool_nbytes` None takes all
    that is left of a card; on a CPU it must be given. `graphs`: capture decode steps, on a card.

    `max_rows`: sequences in one step, for which graphs are captured. `draft_tokens`: guessed tokens of a sequence that
    a step may check, if that is cheap with this model's matrices; 0 for none. `index_nbytes`: of a card, for the
    indexes of windowed documents. `watched_heads`: pairs of layer and KV head by which is told where answers look.
    """

    kv_type: KVType
    n_slots: int = 16
    tail_tokens: int = 2048
    max_context: int = 0
    max_rows: int = 8
    draft_tokens: int = 0
    chunk_tokens: int = CHUNK_TOKENS
    backend: Choice = "auto"
    product: ProductChoice = "auto"
    index_nbytes: int = 0
    watched_heads: tuple[tuple[int, int], ...] = ()
    reserve_nbytes: int = RESERVE_NBYTES
    pool_nbytes: int | None = None
    graphs: bool = True


def load_runner(
    model_dir: Path,
    options: Options,
    device: str = "cuda:0",
    phase_over: Callable[[str], None] = lambda name: None,
    ledger: Ledger | None = None,
) -> Exl2Runner:
    """A runner on a card, or on "cpu" in FP32. `phase_over` is told `load`, `tails` and `pool` as each is done.
    `ledger`: the card's plan, where it was made for more than this model.

    Raises ModelError and its kinds (EngineRefused, MemoryPlanRefused, UnsupportedModel), ValueError for a backend that
    does not run here.
    """
    card = load_card(model_dir)
    check_engine(card, "exl2")
    check_card(torch.device(device))
    check_kv_type(card, options.kv_type)
    layout, place = card.layout(options.kv_type), torch.device(device)
    backend = select_backend(layout, place, options.backend)  # refuses what does not run before minutes of loading
    options = replace(options, graphs=options.graphs and backend.can_be_captured)
    if place.type == "cuda":
        if ledger is None:
            ledger = plan(model_dir, card, layout, options)
            log.info("the card's memory:\n%s", ledger.table())
        model, n_blocks = _on_card(model_dir, card, options), ledger.pool_blocks
    else:
        model, n_blocks = _on_cpu(model_dir, card, layout, options)
    phase_over("load")
    runner = make_runner(model, card, options, n_blocks, phase_over)
    runner.ledger = ledger
    return runner


def make_runner(
    model: DecoderModel,
    card: ModelCard,
    options: Options,
    n_blocks: int,
    phase_over: Callable[[str], None] = lambda name: None,
) -> Exl2Runner:
    """A runner over a loaded model, with a pool of `n_blocks` blocks; several may share the model. Raises ValueError
    for a backend that does not run on the model's device."""
    layout, place = card.layout(options.kv_type), model.device
    backend = select_backend(layout, place, options.backend)
    tails = Tails(layout, options.n_slots, options.tail_tokens, model.dtype, place)
    phase_over("tails")
    pool = BlockPool(layout, n_blocks, place)
    phase_over("pool")
    runner = Exl2Runner(
        model,
        backend,
        card,
        options.kv_type,
        pool=pool,
        tails=tails,
        chunk_tokens=options.chunk_tokens,
        watched_heads=options.watched_heads,
    )
    cheap = min(model.cheap_rows, DRAFT_ROWS)
    runner.limits = replace(
        runner.limits,
        max_context=min(card.max_context, n_blocks * layout.block_tokens),
        draft_tokens=min(options.draft_tokens, cheap - 1),
        draft_rows=cheap,
    )
    if place.type == "cuda":
        warm_up(runner, model)
    if place.type == "cuda" and options.graphs and backend.can_be_captured:
        capture_steps(runner, model, options)
    return runner


def capture_steps(runner: Exl2Runner, model: DecoderModel, options: Options) -> None:
    """Capture decode steps of up to `max_rows` rows, and of drafts behind them, on documents as long as may be."""
    limits, group_heads = runner.limits, model.n_heads // model.n_kv_heads
    rows = step_rows(options.max_rows, limits.draft_tokens, group_heads, limits.draft_rows)
    longest = min(runner.limits.max_context, runner.pool.n_blocks * runner.layout.block_tokens)
    graphs = DecodeGraphs(
        runner.step_logits,
        CudaCapture(model.device),
        model.device,
        max_rows=rows[-1],
        more_rows=rows,
        max_tokens=longest,
        max_tail=options.tail_tokens,
    )
    with torch.inference_mode():
        model.settle(graphs.rows)
        graphs.capture_all()
    runner.graphs = graphs
    log.info("captured %d decode steps", graphs.n_graphs)


def _on_card(model_dir: Path, card: ModelCard, options: Options) -> DecoderModel:
    from service.engine.exl2_engine.exllama import ExllamaModel

    elements = dq_elements(model_dir, card)
    model = ExllamaModel.load(
        model_dir, max_rows=options.chunk_tokens, max_dq_elements=elements, product=options.product
    )
    torch.cuda.empty_cache()  # what only loading needed is not in the plan
    return model


def _on_cpu(model_dir: Path, card: ModelCard, layout: KVLayout, options: Options) -> tuple[DecoderModel, int]:
    from service.engine.exl2_engine.plain import PlainModel

    if card.needs_card:
        raise EngineRefused(f"the weights of {card.name} are quantized ({card.quantization}): they need an NVIDIA card")
    if options.pool_nbytes is None:
        raise ValueError("without a card the memory for documents must be given")
    return PlainModel.load(model_dir, torch.float32), options.pool_nbytes // block_nbytes(layout)


def plan(model_dir: Path, card: ModelCard, layout: KVLayout, options: Options, beside: Beside = ALONE) -> Ledger:
    """The memory plan of a model on the first card as it is now, with a draft model `beside` it. Raises
    MemoryPlanRefused."""
    sizes = sizes_of(model_dir, card, layout, options)
    config = vars(read_decoder(model_dir))
    torch.cuda.init()
    memory = CardMemory(*torch.cuda.mem_get_info(0))
    required = bool(options.max_context)
    spans = tensor_spans(model_dir)
    return plan_memory(spans, config, layout, sizes, memory, require_context=required, beside=beside)


def sizes_of(model_dir: Path, card: ModelCard, layout: KVLayout, options: Options) -> Sizes:
    """What a plan needs to know of the options, and of the model beside its tensors."""
    rows = step_rows(options.max_rows, options.draft_tokens, card.n_heads // layout.n_kv_heads)
    return Sizes(
        max_context=min(options.max_context or card.max_context, card.max_context),
        n_slots=options.n_slots,
        tail_tokens=options.tail_tokens,
        chunk_tokens=options.chunk_tokens,
        rope_rows=ROPE_ROWS,
        max_dq_elements=dq_elements(model_dir, card),
        graph_rows=tuple(rows) if options.graphs else (),
        graph_contexts=len(CONTEXTS) + 2,
        portable_nbytes=0 if options.graphs else PORTABLE_NBYTES,
        piece_tokens=PIECE_TOKENS,
        replay_scores=SCORES,
        import_nbytes=IMPORT_NBYTES,
        logit_rows=HEAD_ROWS,
        pool_nbytes=options.pool_nbytes,
        index_nbytes=options.index_nbytes,
        reserve_nbytes=options.reserve_nbytes,
    )


def dq_elements(model_dir: Path, card: ModelCard) -> int:
    """How many quantized weights exllamav2 should be able to turn to FP16 at once: any matrix of a layer, whose inputs
    it counts in steps of 128. Not the head, which would take a gigabyte and rarely has many rows."""
    config = vars(read_decoder(model_dir))
    widest = max(config["hidden_size"], config["intermediate_size"], card.n_heads * card.head_dim)
    return weights_footprint(tensor_spans(model_dir), share_head=True).largest_matrix + 128 * widest
