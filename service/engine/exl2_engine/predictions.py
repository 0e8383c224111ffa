"""A model's predictions of given texts, by the engine that reads its weights: what conversions are checked by."""

import gc
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cache_store.layout import KVType
from service.engine.exl2_engine.cards import check_card
from service.engine.exl2_engine.gate import runner_maker
from service.engine.exl2_engine.loading import Options, dq_elements, plan
from service.engine.exl2_engine.runner import CHUNK_TOKENS
from service.engine.models.card import ModelCard
from service.engine.models.convert.likeness import SEEN_TOKENS
from service.engine.models.gate import continuation_logits


def card_predictions(model_dir: Path, card: ModelCard, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits FP32 ``[tokens - SEEN_TOKENS + 1, vocab]`` of each text, over FP16 KV on the first card. Raises ModelError
    and its kinds."""
    from service.engine.exl2_engine.exllama import ExllamaModel

    longest = max(map(len, texts))
    check_card(torch.device("cuda", 0))
    options = Options(KVType.FP16, n_slots=1, tail_tokens=longest, max_context=longest, graphs=False)
    plan(model_dir, card, card.layout(KVType.FP16), options)
    model = ExllamaModel.load(model_dir, max_rows=CHUNK_TOKENS, max_dq_elements=dq_elements(model_dir, card))
    runner = runner_maker(model, card, longest)(KVType.FP16)
    try:
        return [continuation_logits(runner, ids, SEEN_TOKENS).float().cpu() for ids in texts]
    finally:
        del model, runner
        gc.collect()
        torch.cuda.empty_cache()
