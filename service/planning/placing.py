"""Which engine, and where it computes."""

from service.engine.llama_engine.library import gpu_backends
from service.planning.cards import FIRST_EXL2, Card
from service.planning.model import ModelFacts
from service.settings import Settings


def computes_on_card(settings: Settings, backends: list[str] | None) -> bool:
    """Whether the engine uses a card where there is one. `backends`: those of the installed llama.cpp, None without."""
    if settings.engine == "llamacpp":
        return settings.offload != "none" and bool(backends)
    return settings.engine == "exl2"


def served_by_llama(settings: Settings, model: ModelFacts, card: Card) -> bool:
    """Whether the llamacpp engine is the one to plan for where nobody said which: it is the setting, the model was
    imported for it alone, or the card is too old for the exl2 engine."""
    too_old = card.capability is not None and card.capability < FIRST_EXL2
    return settings.engine == "llamacpp" or model.kept or too_old


def llama_takes_cards(settings: Settings) -> bool:
    """Whether llama.cpp would compute on a card that is here, as far as one knows: it may not be installed yet."""
    backends = gpu_backends()
    return settings.offload != "none" and (backends is None or bool(backends))
