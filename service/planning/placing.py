"""Where an engine computes, by its settings."""

from service.settings import Settings


def computes_on_card(settings: Settings, backends: list[str] | None) -> bool:
    """Whether the engine uses a card where there is one. `backends`: those of the installed llama.cpp, None without."""
    if settings.engine == "llamacpp":
        return settings.offload != "none" and bool(backends)
    return settings.engine == "exl2"
