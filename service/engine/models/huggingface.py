"""Read a Hugging Face model directory. Code that comes with a model is never run, pickled weights are not
read.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from service.engine.models.auto_config import stored_config
from service.engine.models.decoder import read_decoder
from service.engine.models.errors import SourceRefused, TokenizerRefused
from service.engine.models.light_transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)
from service.engine.models.quantized import Quantization, check_plain, modules_of, source_spans
from service.engine.models.source import Progress, Source, quiet_transformers, read_by_others
from service.engine.models.support import check_architecture, check_card_engine
from service.engine.models.tokenizer_file import TOKENIZER_NAME, read_tokenizer


def read_directory(path: Path, progress: Progress) -> Source:
    """Read config, tokenizer and safetensors of a directory, in the stored dtype.

    Raises SourceRefused, ArchitectureRefused, TokenizerRefused.
    """
    _check_files(path)
    check_plain(path, modules_of(source_spans(path, None)))
    progress("reading", 0, 3)
    with quiet_transformers():
        config = _config(path, check_architecture)
        progress("reading", 1, 3)
        tokenizer = _tokenizer(path)
        progress("reading", 2, 3)
        with read_by_others(path):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(path),
                config=config,
                dtype="auto",
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise SourceRefused(f"{path} lacks {len(missing)} tensors of its architecture, such as {missing[0]}")
    progress("reading", 3, 3)
    return Source(
        label=path.name,
        config=model.config,
        generation_config=model.generation_config,
        tensors=dict(model.state_dict()),
        tokenizer=tokenizer,
        tokenizer_json=_tokenizer_json(path, tokenizer),
    )


def read_quantized(path: Path, quantization: Quantization, progress: Progress) -> Source:
    """Read config and tokenizer of a directory whose weights are kept as they are.

    Raises SourceRefused, ArchitectureRefused, TokenizerRefused.
    """
    _check_files(path)
    progress("reading", 0, 2)
    with quiet_transformers():
        config = _config(path, check_card_engine)
        progress("reading", 1, 2)
        tokenizer = _tokenizer(path)
        with read_by_others(path):
            generation = (path / "generation_config.json").is_file() and GenerationConfig.from_pretrained(str(path))
    progress("reading", 2, 2)
    return Source(
        label=path.name,
        config=config,
        generation_config=generation or None,
        tensors={},
        tokenizer=tokenizer,
        tokenizer_json=_tokenizer_json(path, tokenizer),
        quantization=quantization,
        directory=path,
    )


def _check_files(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise SourceRefused(f"{path} is neither a GGUF file nor a Hugging Face model directory (no config.json)")
    if not any(path.glob("*.safetensors")):
        pickled = any(path.glob("*.bin")) or any(path.glob("*.pt"))
        why = "only pickled ones, which can run code when read" if pickled else "no weights"
        raise SourceRefused(f"{path} has no safetensors weights: {why}")


def _config(path: Path, check: Callable[[Any], None]) -> Any:
    """transformers' config. What a plan refuses of the same directory is refused first, in the same words."""
    check(read_decoder(path))
    config = stored_config(path)
    check(config)
    return config


def _tokenizer(path: Path) -> PreTrainedTokenizerBase:
    if (path / TOKENIZER_NAME).is_file() and "added_tokens" not in read_tokenizer(path):
        raise SourceRefused(f"{path / TOKENIZER_NAME} cannot be read as a tokenizer: it has no added_tokens")
    with read_by_others(path):
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)


def _tokenizer_json(path: Path, tokenizer: PreTrainedTokenizerBase) -> bytes:
    """The file as it is where there is one: writing it anew could change what it does."""
    if (path / TOKENIZER_NAME).is_file():
        return (path / TOKENIZER_NAME).read_bytes()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerRefused(f"{path} has no tokenizer.json, and its tokenizer cannot be converted to one")
    return backend.to_str().encode()


def stored_dtype(tensors: dict[str, torch.Tensor]) -> torch.dtype:
    """The dtype most of the weights are in."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])
