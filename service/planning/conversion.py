"""Bits to convert a model to, so that it fits: what `preread models convert` is told where `plan` counts otherwise.

A plan counts bits of a weight with embedding and head among them; exllamav2's converter is told those of the layers,
makes the head in `--head-bits`, and leaves the embedding in FP16.
"""

import shlex
from collections.abc import Sequence
from math import floor

import msgspec

from service.errors import Invalid
from service.planning.cards import Card
from service.planning.model import FP16_BITS, ModelFacts
from service.planning.request import Wanted
from service.planning.search import Setting, settings_that_fit

_HEAD_COST = 6.1
"""What a head of 6 bits takes with its scales (`qparams_headoptions`: an eighth of 8, the rest of 6, groups of 128)."""
_MOST, _LEAST = 8.0, 2.2
_STEP = 20
"""Twentieths of a bit."""


class Conversion(msgspec.Struct, frozen=True):
    """`bits`: for `--bits`. `command`: what to run, with SOURCE in it for a model that exists only on paper."""

    bits: float
    command: str


def layer_bits(model: ModelFacts, bits: float) -> float:
    """Bits of a layer's weight at which all weights together have `bits`, rounded down; 0 where that cannot be made."""
    table = model.shape.vocab * model.shape.hidden
    layers = model.layer_parameters
    if layers <= 0:
        return 0.0
    left = (bits * model.n_parameters - table * (FP16_BITS + _HEAD_COST)) / layers
    found = min(_MOST, floor(_STEP * left + 1e-6) / _STEP)
    return found if found >= _LEAST else 0.0


def conversion_for(model: ModelFacts, settings: Sequence[Setting]) -> Conversion | None:
    """What makes the model of the first setting that fits; None where its weights fit as they are, are quantized
    already, or cannot be made so small."""
    if not settings or model.kind not in ("plain", "gguf", "dimensions") or settings[0].bits >= FP16_BITS:
        return None
    bits = layer_bits(model, settings[0].bits)
    if not bits:
        return None
    return conversion_of(model.name if model.kind == "plain" else "SOURCE", bits)


def conversion_of(source: str, bits: float) -> Conversion:
    """`source`: as `preread models convert` takes it, a path or a name."""
    return Conversion(bits, f"preread models convert {shlex.quote(source)} --bits {bits:g}")


def bits_that_fit(model: ModelFacts, card: Card, wanted: Wanted) -> tuple[float, Setting]:
    """Bits to convert to for this card and work, and the setting they are of. Raises Invalid, saying what to do, where
    there are none to choose."""
    if card.is_cpu:
        raise Invalid("EXL2 weights need a card to be served: name it with --card, or give --bits.", param="card")
    settings = settings_that_fit(model, card, wanted)
    if not settings:
        raise Invalid(f"Nothing of {model.name} fits {card.name}: take a smaller model or context.", param="context")
    if settings[0].bits >= FP16_BITS:
        raise Invalid(
            f"The plain weights of {model.name} fit {card.name}: import them, or make them smaller with --bits.",
            param="bits",
        )
    if (found := conversion_for(model, settings)) is None:
        raise Invalid(
            f"Only {settings[0].bits:g} bits a weight fit {card.name}, head and embedding included, and the converter "
            "does not make so few: take a smaller model or context.",
            param="context",
        )
    return found.bits, settings[0]
