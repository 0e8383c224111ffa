"""Why a model cannot be planned, or is not served."""

from collections.abc import Sequence
from pathlib import Path

from cache_store.layout import GROUP
from service.engine.exl2_engine.scratch import Shape
from service.engine.models.errors import ArchitectureRefused
from service.engine.models.support import CARD_TYPES, SUPPORTED_TYPES


def check_width(path: Path, shape: Shape, problems: Sequence[str]) -> None:
    """There is no layout of the KV of other heads, and without one no plan: so what else is wrong is told here."""
    if shape.head_dim % GROUP:
        width = f"its head dim {shape.head_dim} is not a multiple of {GROUP}"
        raise ArchitectureRefused(f"{path.name} cannot be planned: {'; '.join((*problems, width))}")


def problems_of(kind: str, *, quantized: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Why it is not served, and where it is, why not on a card."""
    types = CARD_TYPES if quantized else SUPPORTED_TYPES
    if kind not in types:
        return (f"models of type {kind or 'unknown'} are not served, only {', '.join(types)}",), ()
    if kind not in CARD_TYPES:
        return (), (f"models of type {kind} are not served on a card, only {', '.join(CARD_TYPES)}",)
    return (), ()
