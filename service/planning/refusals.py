"""Why a model cannot be planned, or is not served."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cache_store.layout import GROUP
from service.engine.exl2_engine.scratch import Shape
from service.engine.models.errors import ArchitectureRefused, SourceRefused
from service.engine.models.quantized import Modules, Quantization, check_modules
from service.engine.models.support import CARD_TYPES, SUPPORTED_TYPES, architecture_problems, card_problems


def check_width(path: Path, shape: Shape, problems: Sequence[str]) -> None:
    """There is no layout of the KV of other heads, and without one no plan: so what else is wrong is told here."""
    if shape.head_dim % GROUP:
        width = f"its head dim {shape.head_dim} is not a multiple of {GROUP}"
        told = problems if any(width in problem for problem in problems) else (*problems, width)
        raise ArchitectureRefused(f"{path.name} cannot be planned: {'; '.join(told)}")


def directory_problems(
    path: Path, decoder: Any, quantization: Quantization | None, modules: Modules
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What an import of this directory refuses, and where it takes it, why a card does not."""
    if quantization is None:
        problems = architecture_problems(decoder)
        return tuple(problems), () if problems else tuple(card_problems(decoder))
    problems = card_problems(decoder)
    try:
        check_modules(path, modules, quantization, decoder.num_hidden_layers)
    except SourceRefused as error:
        problems.append(str(error))
    return tuple(problems), ()


def problems_of(kind: str, *, quantized: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Why it is not served, and where it is, why not on a card."""
    types = CARD_TYPES if quantized else SUPPORTED_TYPES
    if kind not in types:
        return (f"models of type {kind or 'unknown'} are not served, only {', '.join(types)}",), ()
    if kind not in CARD_TYPES:
        return (), (f"models of type {kind} are not served on a card, only {', '.join(CARD_TYPES)}",)
    return (), ()
