"""What a conversion is asked for. Needs no torch."""

import hashlib
import json
from pathlib import Path

import msgspec

from service.engine.models.errors import SourceRefused
from service.engine.models.weights import tensor_spans

REQUEST_VERSION = 1
HEAD_BITS = (2, 3, 4, 5, 6, 8)
"""What exllamav2 0.3.2 knows for a head (`qparams_headoptions`)."""
LEAST_BITS, MOST_BITS = 2.2, 8.0
"""Below the first even the smallest of exllamav2's choices for every layer is larger."""


class Rows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Calibration rows of so many tokens each, and those among them that the measurement of the choices takes."""

    rows: int = 100
    row_tokens: int = 2048
    measured_rows: int = 16


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identity of a conversion: one that was interrupted is gone on with only if all of this is the same.

    `weights`: of `source_digest`. `calibration`: digest of the rows' token ids, `calibrated_on` in words.
    `converter`: such as "exllamav2 0.3.2".
    """

    format_version: int
    source: str
    weights: str
    bits: float
    head_bits: int
    rows: Rows
    calibration: str
    calibrated_on: str
    converter: str

    @property
    def measurement_key(self) -> str:
        """Of what a measurement depends on: neither of the bits that are asked for."""
        parts = [self.weights, self.calibration, self.converter, msgspec.to_builtins(self.rows)]
        return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def check_bits(bits: float, head_bits: int) -> None:
    """Raises SourceRefused for bits that the converter does not reach."""
    if not LEAST_BITS <= bits <= MOST_BITS:
        raise SourceRefused(f"{bits:g} bits of a weight cannot be made: give {LEAST_BITS} to {MOST_BITS}")
    if head_bits not in HEAD_BITS:
        raise SourceRefused(f"a head of {head_bits} bits cannot be made: give one of {', '.join(map(str, HEAD_BITS))}")


def source_digest(directory: Path) -> str:
    """Identity of weights that costs no reading of them: names, shapes, and sizes and times of their files."""
    spans = [[s.name, s.dtype, s.shape, s.path.name, s.first] for s in tensor_spans(directory)]
    files = [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(directory.glob("*.safetensors"))]
    config = (directory / "config.json").read_bytes()
    text = json.dumps([spans, files]).encode()
    return hashlib.blake2b(text + config, digest_size=16).hexdigest()


def difference(one: Request, other: Request) -> list[str]:
    """Names of the fields in which two requests differ."""
    return [name for name in Request.__struct_fields__ if getattr(one, name) != getattr(other, name)]
