"""Write a model directory: weights in safetensors (split when large), config, tokenizer and chat template."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from service.engine.models.quantized import Quantization, check_weights, keep_files
from service.engine.models.source import Progress, Source

SHARD_NBYTES = 4 << 30
TEMPLATE_NAME = "chat_template.jinja"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def write_model(
    source: Source, directory: Path, dtype: torch.dtype, progress: Progress, shard_nbytes: int = SHARD_NBYTES
) -> int:
    """Write everything but the card, the floating-point weights in `dtype`. Gives the number of parameters.

    A tensor that aliases another (tied embeddings) is written once. transformers reads the result.
    """
    tensors = _distinct(source.tensors)
    _write_weights(tensors, directory, dtype, progress, shard_nbytes)
    _write_config(source, directory, dtype)
    write_texts(source, directory)
    return sum(t.numel() for t in tensors.values())


def keep_model(source: Source, quantization: Quantization, directory: Path, progress: Progress) -> int:
    """Put a model with quantized weights into a directory as `write_model` does, the weights as they are. Gives the
    number of parameters. Raises SourceRefused for weights that exllamav2 does not read."""
    progress("writing", 0, 1)
    n_parameters = check_weights(source.directory, quantization, source.config.num_hidden_layers)
    keep_files(source.directory, quantization, directory)
    write_texts(source, directory)
    progress("writing", 1, 1)
    return n_parameters


def write_texts(source: Source, directory: Path) -> None:
    """Tokenizer and chat template."""
    (directory / "tokenizer.json").write_bytes(source.tokenizer_json)
    if template := chat_template(source):
        (directory / TEMPLATE_NAME).write_text(template, encoding="utf-8")


def chat_template(source: Source) -> str:
    """The model's chat template, "" when it has none."""
    return source.tokenizer.get_chat_template() if source.tokenizer.chat_template else ""


def _distinct(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    seen: set[tuple[Any, ...]] = set()
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if memory not in seen or not tensor.numel():
            seen.add(memory)
            kept[name] = tensor
    return kept


def _write_weights(
    tensors: dict[str, torch.Tensor],
    directory: Path,
    dtype: torch.dtype,
    progress: Progress,
    shard_nbytes: int,
) -> None:
    shards = _shards(tensors, dtype, shard_nbytes)
    names = [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for done, (file_name, shard) in enumerate(zip(names, shards, strict=True)):
        progress("writing", done, len(shards))
        cast = {k: (tensors[k].to(dtype) if tensors[k].is_floating_point() else tensors[k]) for k in shard}
        save_file({k: t.contiguous() for k, t in cast.items()}, directory / file_name, metadata={"format": "pt"})
        # the library writes through a private temporary file; other users of the machine may read a model
        (directory / file_name).chmod(0o644)
    progress("writing", len(shards), len(shards))
    if len(shards) > 1:
        total = sum(t.numel() * dtype.itemsize for t in tensors.values())
        weight_map = {k: name for name, shard in zip(names, shards, strict=True) for k in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _shards(tensors: dict[str, torch.Tensor], dtype: torch.dtype, shard_nbytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * dtype.itemsize
        if shards[-1] and used + nbytes > shard_nbytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += nbytes
    return shards


def _write_config(source: Source, directory: Path, dtype: torch.dtype) -> None:
    config = source.config
    config.dtype = dtype
    config._name_or_path = ""
    config.save_pretrained(directory)
    if source.generation_config is not None:
        source.generation_config.save_pretrained(directory)
