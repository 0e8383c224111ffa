"""What is recorded about a conversion, beside the model's card. Needs no torch."""

from pathlib import Path

import msgspec

from service.engine.models.errors import ModelDamaged
from service.engine.models.record import save_record, version_of

CONVERSION_NAME = "conversion.json"
CONVERSION_VERSION = 1
WARN_KL = 0.1
"""Mean KL (nats) above which a conversion is told to be noticeable. KL(source || converted) is by how much the log-loss
rises on text as the source itself writes it: perplexity there is exp(KL) times as high, 1.1 times at this limit."""
REFUSE_KL = 0.5
"""Above it (1.65 times) nothing is published unless it is asked for: too few bits, or a conversion that went wrong."""


class Likeness(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Next-token predictions against the source's on held-out texts: KL (nats) of each position, share of positions
    with the same first choice, and how well both predict the texts."""

    mean_kl: float
    p99_kl: float
    top1_agreement: float
    perplexity: float
    source_perplexity: float
    n_positions: int


class Conversion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`weights`: digest of the converted weights that this is about. `bits`: of a weight of the layers, `head_bits` of
    the head's. `calibration`: digest of the rows' token ids."""

    format_version: int
    weights: str
    source: str
    bits: float
    head_bits: int
    calibration: str
    calibrated_on: str
    rows: int
    row_tokens: int
    converter: str
    likeness: Likeness


def save_conversion(conversion: Conversion, model_dir: Path) -> None:
    """Write the file, replacing an earlier one at once; durable when this returns."""
    save_record(conversion, model_dir / CONVERSION_NAME)


def read_conversion(model_dir: Path) -> Conversion | None:
    """What is recorded; None for a model that was not converted here. Raises ModelDamaged for what cannot be read."""
    path = model_dir / CONVERSION_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        if (version := version_of(data)) == CONVERSION_VERSION:
            return msgspec.json.decode(data, type=Conversion)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelDamaged(f"{path} cannot be read: {error}") from error
    raise ModelDamaged(f"{path} has format version {version}, this program reads {CONVERSION_VERSION}")
