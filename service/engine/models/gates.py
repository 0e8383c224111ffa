"""Which engine runs the KL gate: the one that reads the weights."""

from importlib.util import find_spec
from pathlib import Path

import torch

from service.engine.llama_engine.library import installed
from service.engine.models.card import KVGate, ModelCard
from service.engine.models.errors import EngineRefused
from service.engine.models.source import Progress, silent
from service.engine.models.torch_gate import torch_gate


def gate_if_possible(model_dir: Path, card: ModelCard, progress: Progress = silent) -> dict[str, KVGate]:
    """The gate of an import. Nothing is measured of a model that needs a card where there is none: until
    `preread models measure` has run on one, such a model is served with FP16 KV only."""
    if (card.needs_card and not card_engine_ready()) or (card.engine == "llamacpp" and not installed()):
        return {}
    return gate_again(model_dir, card, progress)


def gate_again(model_dir: Path, card: ModelCard, progress: Progress = silent) -> dict[str, KVGate]:
    """The gate of `preread models measure`. Raises EngineRefused when the model needs a card and there is none."""
    if card.engine == "llamacpp":
        from service.engine.llama_engine.gate import llama_gate

        return llama_gate(model_dir, card, progress)
    if not card.needs_card:
        return torch_gate(model_dir, card, progress)
    if not card_engine_ready():
        raise EngineRefused(
            f"the weights of {card.name} are quantized ({card.quantization}) and can be measured only where there are "
            "an NVIDIA card and exllamav2 (.venv/bin/pip install '.[gpu]' in Preread's folder): run `preread models "
            "measure` there"
        )
    from service.engine.exl2_engine.gate import card_gate

    return card_gate(model_dir, card, progress)


def card_engine_ready() -> bool:
    """Whether this machine has an NVIDIA card and exllamav2."""
    return torch.cuda.is_available() and find_spec("exllamav2") is not None
