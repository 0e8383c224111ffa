"""Bits to convert a model to, so that it fits: what `preread models convert` is told where `plan` counts otherwise.

A plan counts bits of a weight with embedding and head among them; exllamav2's converter is told those of the layers,
makes the head in `--head-bits`, and leaves the embedding in FP16.
"""

import shlex
from collections.abc import Sequence
from math import ceil, floor

import msgspec

from service.errors import Invalid
from service.planning.cards import Card
from service.planning.model import FP16_BITS, ModelFacts
from service.planning.request import Wanted
from service.planning.search import Setting, settings_that_fit

_HEADS = {2: (32, 4, 0.3), 3: (32, 4, 0.15), 4: (32, 6, 0.15), 5: (128, 6, 0.15), 6: (128, 8, 0.15), 8: (128, 8, 1.0)}
"""`--head-bits` -> rows of a group, and the bits of the first groups and their share of all rows; the rest has what was
asked for (`qparams_headoptions` of exllamav2 0.3.2)."""
_HEAD_BITS = 6
"""The command's default, which `plan` counts with."""
_SCALE_BITS = 4
"""Of each group and column."""
_MOST, _LEAST = 8.0, 2.2
_STEP = 20
"""Twentieths of a bit."""


class Conversion(msgspec.Struct, frozen=True):
    """`bits`: for `--bits`. `command`: what to run, with SOURCE in it for a model that exists only on paper."""

    bits: float
    command: str


def layer_bits(model: ModelFacts, bits: float, head_bits: int = _HEAD_BITS) -> float:
    """Bits of a layer's weight at which all weights together have `bits`, rounded down; 0 where that cannot be made."""
    table = model.shape.vocab * model.shape.hidden
    layers = model.layer_parameters
    if layers <= 0:
        return 0.0
    left = (bits * model.n_parameters - table * (FP16_BITS + head_cost(model.shape.hidden, head_bits))) / layers
    found = min(_MOST, floor(_STEP * left + 1e-6) / _STEP)
    return found if found >= _LEAST else 0.0


def head_cost(hidden: int, head_bits: int) -> float:
    """Bits that a weight of the head takes, scales included, as the converter cuts its rows (`QParams.total_bits`)."""
    group, first_bits, share = _HEADS[head_bits]
    first = min(hidden, ceil(hidden * share / group) * group)
    scales = -(-hidden // group) * _SCALE_BITS
    return (first * first_bits + (hidden - first) * head_bits + scales) / hidden


def conversion_for(model: ModelFacts, settings: Sequence[Setting], head_bits: int = _HEAD_BITS) -> Conversion | None:
    """What makes the model of the first setting that fits; None where its weights fit as they are, are quantized
    already, or cannot be made so small."""
    if not settings or model.kind not in ("plain", "gguf", "dimensions") or settings[0].bits >= FP16_BITS:
        return None
    bits = layer_bits(model, settings[0].bits, head_bits)
    if not bits:
        return None
    return conversion_of(model.name if model.kind == "plain" else "SOURCE", bits)


def conversion_of(source: str, bits: float) -> Conversion:
    """`source`: as `preread models convert` takes it, a path or a name."""
    return Conversion(bits, f"preread models convert {shlex.quote(source)} --bits {bits:g}")


def bits_that_fit(model: ModelFacts, card: Card, wanted: Wanted, head_bits: int = _HEAD_BITS) -> tuple[float, Setting]:
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
    if (found := conversion_for(model, settings, head_bits)) is None:
        raise Invalid(
            f"Only {settings[0].bits:g} bits a weight fit {card.name}, head and embedding included, and the converter "
            "does not make so few: take a smaller model or context.",
            param="context",
        )
    return found.bits, settings[0]
