"""The KL gate on a card: which KV types a model stands, measured by the engine that reads its weights."""

from collections.abc import Callable
from pathlib import Path

import torch

from cache_store.layout import KVType
from service.engine.exl2_engine.cards import check_card
from service.engine.exl2_engine.loading import Options, dq_elements, make_runner, plan
from service.engine.exl2_engine.model import DecoderModel
from service.engine.exl2_engine.runner import CHUNK_TOKENS, Exl2Runner
from service.engine.models.card import KVGate, ModelCard
from service.engine.models.gate import gate_ids, measure_kv_types
from service.engine.models.source import Progress, silent

GATE_CHUNK_TOKENS = 512
"""Shorter than those that serve: the text is short, and later chunks shall attend to the stored form of earlier."""


def card_gate(model_dir: Path, card: ModelCard, progress: Progress = silent) -> dict[str, KVGate]:
    """The gate over the bundled text, in FP16 on the first card. Raises ModelError and its kinds."""
    from service.engine.exl2_engine.exllama import ExllamaModel

    ids = gate_ids(model_dir, card)
    check_card(torch.device("cuda", 0))
    options = Options(KVType.FP16, n_slots=1, tail_tokens=len(ids), max_context=len(ids), graphs=False)
    plan(model_dir, card, card.layout(KVType.FP16), options)
    model = ExllamaModel.load(model_dir, max_rows=CHUNK_TOKENS, max_dq_elements=dq_elements(model_dir, card))
    return measure_kv_types(runner_maker(model, card, len(ids)), ids, progress=progress)


def runner_maker(model: DecoderModel, card: ModelCard, n_tokens: int) -> Callable[[KVType], Exl2Runner]:
    """Makes runners over one loaded model, each with room for `n_tokens` tokens in a KV type, measured or not."""

    def make(kv_type: KVType) -> Exl2Runner:
        options = Options(kv_type, n_slots=1, tail_tokens=n_tokens, chunk_tokens=GATE_CHUNK_TOKENS, graphs=False)
        return make_runner(model, card, options, card.layout(kv_type).n_blocks(n_tokens))

    return make
