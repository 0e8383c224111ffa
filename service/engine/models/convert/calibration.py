"""Rows of token ids to calibrate on, by the model's own tokenizer: the user's texts, then the bundled mix."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor

from service.engine.models.convert.request import Rows
from service.engine.models.convert.texts import bundled_texts, held_out_texts
from service.engine.models.convert.work import CALIBRATION_NAME, HELD_OUT_NAME
from service.engine.models.errors import SourceRefused
from service.engine.tokenizer import Tokenizer

HELD_OUT_TOKENS = 512
"""Of one text: all of its logits lie on the card at once."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """`ids` int64 ``[rows, tokens]``; `held_out` ids of texts that are in no row. `label`: in words."""

    ids: Tensor
    held_out: list[list[int]]
    rows: Rows
    label: str

    @property
    def digest(self) -> str:
        """32 hex digits over the rows' token ids."""
        header = str(tuple(self.ids.shape)).encode()
        return hashlib.blake2b(header + self.ids.numpy().tobytes(), digest_size=16).hexdigest()

    def save(self, work: Path) -> None:
        """Where the converting process reads them."""
        save_file({"rows": self.ids, "measured": self.measured}, work / CALIBRATION_NAME)
        texts = {str(i): torch.tensor([ids]) for i, ids in enumerate(self.held_out)}
        save_file(texts, work / HELD_OUT_NAME)

    @property
    def measured(self) -> Tensor:
        """The rows that are measured with, taken evenly from all."""
        n = self.rows.measured_rows
        return self.ids[torch.arange(n) * len(self.ids) // n].contiguous()


def make_calibration(source: Path, own_texts: Sequence[str], wanted: Rows, max_context: int) -> Calibration:
    """Rows of `own_texts`, filled up from the bundled mix; as many of the `wanted` ones as the texts give, none twice.

    Raises SourceRefused where that is not even one.
    """
    tokenizer = Tokenizer.load(source)
    first = beginning(source)
    n_tokens = min(wanted.row_tokens, max_context)
    rows = list(islice(_rows(tokenizer, first, own_texts, n_tokens), wanted.rows))
    n_own = len(rows)
    rows += islice(_rows(tokenizer, first, bundled_texts(), n_tokens), wanted.rows - n_own)
    if not rows:
        raise SourceRefused(f"the texts to calibrate on give not even one row of {n_tokens} tokens: add documents")
    held_out = [
        (first + tokenizer.encode_plain(text))[: min(HELD_OUT_TOKENS, max_context)] for text in held_out_texts()
    ]
    made = Rows(len(rows), n_tokens, min(wanted.measured_rows, len(rows)))
    return Calibration(torch.tensor(rows), held_out, made, _label(n_own, len(rows), len(own_texts)))


def beginning(source: Path) -> list[int]:
    """What the tokenizer puts before every text, such as a BOS: every sequence that is served begins so too."""
    raw = tokenizers.Tokenizer.from_str((source / "tokenizer.json").read_text("utf-8"))
    encoded = raw.encode("a", add_special_tokens=True)
    marks = encoded.special_tokens_mask
    return encoded.ids[: marks.index(0)] if 0 in marks else []


def _rows(tokenizer: Tokenizer, first: list[int], texts: Iterable[str], n_tokens: int) -> Iterable[list[int]]:
    """The texts one after another, cut into rows; what is left at the end is dropped."""
    left: list[int] = []
    size = n_tokens - len(first)
    for text in texts:
        left += tokenizer.encode_plain(text)
        while len(left) >= size:
            yield first + left[:size]
            left = left[size:]


def _label(n_own: int, n_rows: int, n_texts: int) -> str:
    if not n_own:
        return "the bundled mix"
    documents = f"{n_texts} document{'s' if n_texts > 1 else ''}"
    return documents if n_own == n_rows else f"{documents} and the bundled mix"


def read_measurement(path: Path, key: str) -> dict[str, object] | None:
    """A measurement that an earlier conversion wrote to `path`; None where there is no such file yet.

    Raises SourceRefused for another kind of file, and for a measurement of other weights or another calibration.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SourceRefused(f"{path} is not a measurement: {error}") from error
    if not isinstance(found, dict) or not {"key", "measurement", "last_module_idx"} <= found.keys():
        raise SourceRefused(f"{path} is not a measurement that `preread models convert` wrote")
    if found["key"] != key:
        raise SourceRefused(f"{path} was measured of other weights, on another calibration or by another converter")
    return {name: found[name] for name in ("measurement", "last_module_idx")}


def check_measurement(path: Path | None, work: Path) -> None:
    """Raises SourceRefused for a place where a measurement could not be written, or would not stay: that shows only
    after half of the work else."""
    if path is None:
        return
    directory = path.absolute().parent
    if work.absolute() in (directory, *directory.parents):
        raise SourceRefused(f"{path} is in the work directory, which is removed at the end: give another --measurement")
    if not directory.is_dir():
        raise SourceRefused(f"there is no directory {directory} to write the measurement to")
