"""Which engine looks for a model's index heads: the one that reads the weights."""

from collections.abc import Callable
from pathlib import Path

from cache_store.layout import KVType
from service.engine.index_heads import IndexHeads, save_index_heads
from service.engine.index_heads_finder import find_index_heads
from service.engine.models.card import ModelCard, load_card
from service.engine.models.errors import EngineRefused
from service.engine.models.gates import card_engine_ready
from service.engine.models.source import Progress, quiet_transformers, silent
from service.engine.prompt import PromptTemplate
from service.engine.tokenizer import Tokenizer
from service.engine.torch_engine.loading import load_model
from service.engine.torch_engine.runner import CHUNK_TOKENS, TorchRunner

FindHeads = Callable[[Path, ModelCard, Progress], IndexHeads | None]
"""Looks for the index heads of a finished directory; None where that is not possible."""

QUESTION_TOKENS = 256
"""Room for one question."""
_LEAST_CONTEXT = 1024


def heads_if_possible(model_dir: Path, card: ModelCard, progress: Progress = silent) -> IndexHeads | None:
    """Of an import. None for a model that needs a card where there is none, and for one of a short context: without
    index heads its documents are kept whole."""
    if card.engine == "llamacpp" or card.max_context < _LEAST_CONTEXT:
        return None
    if card.needs_card and not card_engine_ready():
        return None
    try:
        return _find(model_dir, card, progress)
    except EngineRefused:
        return None


def heads_again(model_dir: Path, progress: Progress = silent) -> IndexHeads:
    """Look for the index heads of an imported model, and record them with it.

    Raises EngineRefused when the model needs a card and there is none, or has too short a context.
    """
    card = load_card(model_dir)
    if card.engine == "llamacpp":
        raise EngineRefused(f"{card.name} is served by llama.cpp, which does not give what its heads attend to")
    if card.needs_card and not card_engine_ready():
        raise EngineRefused(
            f"the weights of {card.name} are quantized ({card.quantization}): its index heads can be found only where "
            "there are an NVIDIA card and exllamav2 (.venv/bin/pip install '.[gpu]' in Preread's folder)"
        )
    found = _find(model_dir, card, progress)
    save_index_heads(found, model_dir)
    return found


def _find(model_dir: Path, card: ModelCard, progress: Progress) -> IndexHeads:
    if not card.needs_card:
        return _on_torch(model_dir, card, progress)
    from service.engine.exl2_engine.heads import card_heads

    return card_heads(model_dir, card, progress)


def _on_torch(model_dir: Path, card: ModelCard, progress: Progress) -> IndexHeads:
    """On a CPU, with keys as they are computed; in FP32 for weights stored so, else in BF16."""
    with quiet_transformers():
        loaded = load_model(model_dir, "float32" if card.dtype == "float32" else "bfloat16", "cpu")
    runner = TorchRunner(loaded, KVType.FP16, n_slots=1, tail_tokens=QUESTION_TOKENS, chunk_tokens=CHUNK_TOKENS)
    template = PromptTemplate(card.prompt, Tokenizer.load(model_dir))
    return find_index_heads(runner, template, card.digests.weights, progress=progress)
