"""A model in memory between being read from somewhere and being written as a model directory."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from service.engine.models.errors import ModelError, SourceRefused
from service.engine.models.light_transformers import PreTrainedTokenizerBase, logging, no_compiler
from service.engine.models.quantized import Quantization

Progress = Callable[[str, int, int], None]
"""Told (stage, done, total). Stages: reading, merging, writing, hashing, measuring."""


def silent(stage: str, done: int, total: int) -> None:
    """A Progress that tells nobody."""


@dataclass(slots=True)
class Source:
    """What an importer read. `tensors` are by parameter name, tied ones may alias; `tokenizer_json` is the
    file.

    `tokenizer` renders the chat template and names the special tokens; ids come from `tokenizer_json` only.
    `quantization`: of weights that are kept as they lie in `directory`; there are no `tensors` then.
    """

    label: str
    config: Any
    generation_config: Any
    tensors: dict[str, torch.Tensor]
    tokenizer: PreTrainedTokenizerBase
    tokenizer_json: bytes
    quantization: Quantization | None = None
    directory: Path = Path()


class _Dropped(io.StringIO):
    """Takes the place of a stream and keeps nothing; rich, which draws our own bars, finds the stream itself."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.rich_proxied_file = getattr(stream, "rich_proxied_file", stream)

    def write(self, text: str, /) -> int:
        return len(text)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the terminal: progress is told by `Progress`.

    The bar of its GGUF reader has no switch, so what is written to standard error meanwhile is dropped.
    """
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with no_compiler(), redirect_stderr(_Dropped(sys.stderr)):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def read_by_others(path: Path) -> Iterator[None]:
    """What transformers and tokenizers raise for a file of `path` becomes SourceRefused."""
    try:
        yield
    except (ModelError, MemoryError):
        raise
    except Exception as error:  # of any kind: they believe what they read, and tokenizers raises bare Exception
        known = isinstance(error, (ValueError, OSError, RuntimeError))
        told = " ".join(str(error).split())
        raise SourceRefused(
            f"{path} cannot be read as a model: {told if known and told else f'{type(error).__name__}: {told}'}"
        ) from error
