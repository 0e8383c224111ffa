"""A model's index heads, found by the engine that reads its weights."""

from pathlib import Path

import torch

from cache_store.layout import KVType
from service.engine.exl2_engine.cards import check_card
from service.engine.exl2_engine.gate import GATE_CHUNK_TOKENS
from service.engine.exl2_engine.loading import Options, dq_elements, make_runner, plan
from service.engine.exl2_engine.model import DecoderModel
from service.engine.exl2_engine.runner import CHUNK_TOKENS, Exl2Runner
from service.engine.index_heads import IndexHeads
from service.engine.index_heads_finder import find_index_heads
from service.engine.models.card import ModelCard
from service.engine.models.source import Progress, silent
from service.engine.prompt import PromptTemplate
from service.engine.tokenizer import Tokenizer

_CONTEXT = 4096
"""As long as the text may be, with any tokenizer."""
_POOL_TOKENS = _CONTEXT + 1024
"""One document, and the two ends of it that questions see."""


def card_heads(model_dir: Path, card: ModelCard, progress: Progress = silent) -> IndexHeads:
    """The index heads, found in FP16 on the first card. Raises ModelError and its kinds."""
    from service.engine.exl2_engine.exllama import ExllamaModel

    check_card(torch.device("cuda", 0))
    options = heads_options()
    plan(model_dir, card, card.layout(options.kv_type), options)
    model = ExllamaModel.load(model_dir, max_rows=CHUNK_TOKENS, max_dq_elements=dq_elements(model_dir, card))
    template = PromptTemplate(card.prompt, Tokenizer.load(model_dir))
    return find_index_heads(heads_runner(model, card), template, card.digests.weights, progress=progress)


def heads_options() -> Options:
    return Options(
        KVType.FP16, n_slots=1, tail_tokens=256, max_context=_POOL_TOKENS, chunk_tokens=GATE_CHUNK_TOKENS, graphs=False
    )


def heads_runner(model: DecoderModel, card: ModelCard) -> Exl2Runner:
    """A runner over a loaded model with room for the planted text."""
    layout = card.layout(KVType.FP16)
    return make_runner(model, card, heads_options(), layout.n_blocks(_POOL_TOKENS))
