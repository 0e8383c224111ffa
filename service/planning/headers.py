"""Model files read for their headers only: directories of safetensors, and GGUF."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from service.engine.exl2_engine.scratch import Shape
from service.engine.index_heads import HEADS_NAME
from service.engine.models.card import load_card
from service.engine.models.decoder import read_decoder
from service.engine.models.errors import ModelError, ModelNotFound, SourceRefused
from service.engine.models.quantized import (
    check_parts,
    check_plain,
    find_quantization,
    modules_of,
    n_elements,
    source_spans,
)
from service.engine.models.support import max_context
from service.engine.models.weights import GGUF_NAME, TensorSpan
from service.planning.gguf import read_gguf_facts
from service.planning.model import ModelFacts, facts_of_spans
from service.planning.refusals import check_width, directory_problems

_ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1}


def read_model(path: Path) -> ModelFacts:
    """The facts of a model directory or a GGUF file. Raises ModelError in its kinds: what is missing or damaged."""
    if path.is_file() and path.suffix.lower() == ".gguf":
        return read_gguf_facts(path)
    if path.is_dir() and not (path / "config.json").is_file() and (files := sorted(path.glob("*.gguf"))):
        return read_gguf_facts(_only(files, path))
    if (path / GGUF_NAME).is_file():
        allowed, heads, notes = _imported(path)
        facts = read_gguf_facts(path / GGUF_NAME)
        return replace(facts, name=path.name, allowed_kv=allowed, index_heads=heads, notes=notes, kept=True)
    if path.exists() and not path.is_dir():
        raise SourceRefused(f"{path} is neither a GGUF file (.gguf) nor a directory")
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
    decoder = read_decoder(path)
    quantization = find_quantization(path)
    spans = source_spans(path, quantization)
    if not spans:
        raise SourceRefused(f"{path} has no safetensors files, from whose headers sizes are read")
    modules = modules_of(spans)
    if quantization is None:
        check_plain(path, modules)
    check_parts(modules)
    shape = Shape.of(vars(decoder))
    problems, on_card = directory_problems(path, decoder, quantization, modules)
    check_width(path, shape, problems)
    n_parameters = sum(map(n_elements, modules.values()))
    footprint, bits, stored, joined = facts_of_spans(spans, shape, n_parameters, tied=decoder.tie_word_embeddings)
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
        max_context=max_context(decoder),
        bits=bits,
        joined_params=joined,
        stored_itemsize=0 if quantization else _ITEMSIZE.get(_stored_dtype(spans), 2),
        allowed_kv=allowed,
        index_heads=heads,
        problems=problems,
        card_problems=on_card,
        notes=notes,
    )


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
