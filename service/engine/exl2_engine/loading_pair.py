"""A model and its draft model on one card: one memory plan for both, the draft model loaded first."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from cache_store.layout import KVLayout
from service.engine.exl2_engine.backends import select_backend
from service.engine.exl2_engine.cards import check_card
from service.engine.exl2_engine.footprint import weights_footprint
from service.engine.exl2_engine.ledger import LIBRARIES, block_table_nbytes, ledger_of
from service.engine.exl2_engine.loading import Options, load_runner, plan, sizes_of
from service.engine.exl2_engine.pool import block_nbytes
from service.engine.exl2_engine.runner import Exl2Runner
from service.engine.exl2_engine.scratch import Shape
from service.engine.ledger import Beside, CardMemory
from service.engine.models.card import check_engine, load_card
from service.engine.models.decoder import read_decoder
from service.engine.models.weights import tensor_spans

log = logging.getLogger(__name__)


def load_pair(
    model_dir: Path, options: Options, draft_dir: Path, draft_options: Options, device: str = "cuda:0"
) -> tuple[Exl2Runner, Exl2Runner]:
    """The model's runner and its draft model's, whose pool holds as many tokens. Raises what `load_runner` raises."""
    card = load_card(model_dir)
    check_engine(card, "exl2")
    check_card(torch.device(device))
    layout = card.layout(options.kv_type)
    draft_layout = load_card(draft_dir).layout(draft_options.kv_type)
    if torch.device(device).type != "cuda":
        pool = (options.pool_nbytes or 0) // block_nbytes(layout) * block_nbytes(draft_layout)
        draft = load_runner(draft_dir, replace(draft_options, pool_nbytes=pool), device)
        return load_runner(model_dir, options, device), draft
    options, draft_options = _captured(layout, options, device), _captured(draft_layout, draft_options, device)
    beside = draft_beside(draft_dir, draft_options)
    ledger = plan(model_dir, card, layout, options, beside)
    log.info("the card's memory:\n%s", ledger.table())
    draft = load_runner(draft_dir, draft_options, device, ledger=ledger)
    return load_runner(model_dir, options, device, ledger=ledger), draft


def draft_beside(draft_dir: Path, options: Options) -> Beside:
    """What a draft model takes of the card, beside the libraries that are there once."""
    card = load_card(draft_dir)
    layout = card.layout(options.kv_type)
    sizes = replace(sizes_of(draft_dir, card, layout, options), reserve_nbytes=0, pool_nbytes=0)
    config = vars(read_decoder(draft_dir))
    footprint = weights_footprint(tensor_spans(draft_dir), share_head=sizes.share_head)
    own = ledger_of(Shape.of(config), footprint, layout, sizes, CardMemory(0, 0))
    return own.beside((LIBRARIES,), block_table_nbytes(layout))


def _captured(layout: KVLayout, options: Options, device: str) -> Options:
    """Without captured steps where attention cannot be captured."""
    backend = select_backend(layout, torch.device(device), options.backend)
    return replace(options, graphs=options.graphs and backend.can_be_captured)
