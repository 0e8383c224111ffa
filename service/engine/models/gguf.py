"""Read a GGUF file: its tensors dequantized to float32, its tokenizer rebuilt, both by transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import torch

from service.engine.models.errors import ModelError, SourceRefused
from service.engine.models.gguf_header import MAGIC, read_header
from service.engine.models.gguf_support import check_gguf
from service.engine.models.light_transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from service.engine.models.source import Progress, Source, quiet_transformers
from service.engine.models.support import check_architecture


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF by its first bytes, whatever its name."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path, progress: Progress) -> Source:
    """Read and dequantize a GGUF; the weights are float32. Raises SourceRefused, ArchitectureRefused."""
    progress("reading", 0, 3)
    check_gguf(read_header(path), kept=False)
    with reading(path) as place:
        config = AutoConfig.from_pretrained(**place)
        check_architecture(config)
        progress("reading", 1, 3)
        tokenizer = AutoTokenizer.from_pretrained(**place)
        progress("reading", 2, 3)
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    progress("reading", 3, 3)
    config = model.config
    # the loaded model calls itself quantized although its tensors are plain float32 now
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    return Source(
        label=path.name,
        config=config,
        generation_config=model.generation_config,
        tensors=dict(model.state_dict()),
        tokenizer=tokenizer,
        tokenizer_json=tokenizer.backend_tokenizer.to_str().encode(),
    )


@contextmanager
def reading(path: Path) -> Iterator[dict[str, Any]]:
    """Gives the arguments by which transformers reads a GGUF. Errors in the block become SourceRefused."""
    place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "local_files_only": True}
    with quiet_transformers(), _parsed_once():
        try:
            yield place
        except (ModelError, MemoryError):
            raise
        except Exception as error:  # transformers' parsers fail by whatever the first wrong value leads to
            why = str(error) or type(error).__name__
            raise SourceRefused(f"{path} cannot be read as a GGUF model: {why}") from error


@contextmanager
def _parsed_once() -> Iterator[None]:
    """transformers parses the whole file for the configuration, twice for the tokenizer and for the weights, and makes
    the table of tensor names for every module of the model: seconds each time, and always the same."""
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = cache(reader), cache(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, names
