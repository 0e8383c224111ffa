"""Model files read for their headers only: directories of safetensors, and GGUF."""

import json
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from service.engine.exl2_engine.scratch import Shape
from service.engine.index_heads import HEADS_NAME
from service.engine.models.card import load_card
from service.engine.models.errors import ModelError, ModelNotFound, SourceRefused
from service.engine.models.quantized import find_quantization, modules_of, n_elements
from service.engine.models.weights import GGUF_NAME, TensorSpan, tensor_spans
from service.planning.gguf import read_gguf_facts
from service.planning.model import ModelFacts, facts_of_spans
from service.planning.refusals import check_width, problems_of

_ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1}


def read_model(path: Path) -> ModelFacts:
    """The facts of a model directory or a GGUF file. Raises ModelError in its kinds: what is missing or damaged."""
    if path.is_file() and path.suffix == ".gguf":
        return read_gguf_facts(path)
    if path.is_dir() and not (path / "config.json").is_file() and (files := sorted(path.glob("*.gguf"))):
        return read_gguf_facts(_only(files, path))
    if (path / GGUF_NAME).is_file():
        allowed, heads, notes = _imported(path)
        facts = read_gguf_facts(path / GGUF_NAME)
        return replace(facts, name=path.name, allowed_kv=allowed, index_heads=heads, notes=notes, kept=True)
    if not path.is_dir():
        raise ModelNotFound(f"there is no model {path}: give a directory, a GGUF file, or dimensions")
    return _directory(path)


def _only(files: Sequence[Path], directory: Path) -> Path:
    """Which of several quantizations, parts or encoders of images is meant cannot be guessed."""
    if len(files) > 1:
        raise SourceRefused(
            f"{directory} has several GGUF files: give one of them, and join parts of one model first, with "
            f"llama.cpp's `llama-gguf-split --merge`. They are {', '.join(file.name for file in files)}"
        )
    return files[0]


def _directory(path: Path) -> ModelFacts:
    config = _config(path)
    quantization = find_quantization(path)
    spans = tensor_spans(path)
    if not spans:
        raise SourceRefused(f"{path} has no safetensors files, from whose headers sizes are read")
    shape = _shape(config, path)
    problems, on_card = problems_of(str(config.get("model_type", "")), quantized=quantization is not None)
    check_width(path, shape, problems)
    n_parameters = sum(n_elements(parts) for parts in modules_of(spans).values())
    tied = bool(config.get("tie_word_embeddings"))
    footprint, bits, stored, joined = facts_of_spans(spans, shape, n_parameters, tied=tied)
    kind = quantization.method if quantization else "plain"
    label = quantization.label if quantization else f"plain {_stored_dtype(spans)}"
    allowed, heads, notes = _imported(path)
    return ModelFacts(
        name=path.name,
        kind=kind,
        label=label,
        shape=shape,
        footprint=footprint,
        n_parameters=n_parameters,
        stored_nbytes=stored,
        max_context=_max_context(config),
        bits=bits,
        joined_params=joined,
        stored_itemsize=0 if quantization else _ITEMSIZE.get(_stored_dtype(spans), 2),
        allowed_kv=allowed,
        index_heads=heads,
        problems=problems,
        card_problems=on_card,
        notes=notes,
    )


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_bytes())
    except FileNotFoundError:
        raise SourceRefused(f"{path} has no config.json: it is not a model directory") from None
    except ValueError as error:
        raise SourceRefused(f"{path / 'config.json'} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise SourceRefused(f"{path / 'config.json'} is not a JSON object")
    return config


def _shape(config: dict[str, Any], path: Path) -> Shape:
    try:
        shape = Shape.of(config)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise SourceRefused(f"{path / 'config.json'} lacks a size that every decoder has: {error}") from None
    if wrong := [size for size in astuple(shape) if not isinstance(size, int) or size < 1]:
        raise SourceRefused(f"{path / 'config.json'} has no number of a size that every decoder has: {wrong[0]}")
    return shape


def _max_context(config: dict[str, Any]) -> int:
    """As `models.support.max_context`, of a plain dictionary, where RoPE may stand under its older name."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    positions = int(config.get("max_position_embeddings") or 0)
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return positions
    return max(positions, int((rope.get("original_max_position_embeddings") or positions) * rope.get("factor", 1)))


def _stored_dtype(spans: list[TensorSpan]) -> str:
    """That of most bytes."""
    nbytes: dict[str, int] = {}
    for span in spans:
        nbytes[span.dtype] = nbytes.get(span.dtype, 0) + span.nbytes
    return max(nbytes, key=nbytes.__getitem__)


def _imported(path: Path) -> tuple[tuple[str, ...] | None, bool, tuple[str, ...]]:
    """KV types that were allowed, whether index heads are known, and what to say of a directory not imported yet."""
    heads = (path / HEADS_NAME).is_file()
    try:
        card = load_card(path)
    except ModelNotFound:
        return None, True, ("not imported yet: which KV types it stands is measured by `preread models import`",)
    except ModelError as error:
        return None, heads, (str(error),)
    return tuple(name for name, gate in card.kv_types.items() if gate.allowed), heads, ()
