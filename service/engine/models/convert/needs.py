"""What a conversion needs, checked before it begins: a source it can read, a card, a compiler, disk and memory."""

import shutil
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from pathlib import Path

import torch

from service.engine.exl2_engine.exllama_loading import check_sizes
from service.engine.exl2_engine.spec import ModelSpec, read_spec
from service.engine.models.convert.request import Request
from service.engine.models.errors import EngineRefused, SourceRefused
from service.engine.models.quantized import check_plain, find_quantization, modules_of, source_spans
from service.engine.models.weights import TensorSpan
from service.engine.torch_engine.ledger import machine_memory

GIB = 1 << 30
LEAST_CAPABILITY = (7, 0)
_LOGITS_NBYTES = 2


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes. `card` and `memory` are at least that, whatever else exllamav2 takes; `disk` is of the work directory,
    `published` of the models' one where it lies on another disk."""

    card: int
    memory: int
    disk: int
    published: int


def check_source(source: Path) -> ModelSpec:
    """The source's spec. Raises SourceRefused for what is no directory of plain weights, ArchitectureRefused and
    UnsupportedModel for what the exl2 engine would not serve."""
    if source.is_file():
        raise SourceRefused(
            f"{source} is a file: convert a Hugging Face directory, or import a GGUF first (`preread models import`) "
            "and convert what that makes"
        )
    if not (source / "config.json").is_file():
        raise SourceRefused(f"{source} is no model directory: it has no config.json")
    if (quantization := find_quantization(source)) is not None:
        raise SourceRefused(
            f"the weights in {source} are quantized already ({quantization.label}): convert the plain ones that they "
            "were made of, or import them as they are with `preread models import`"
        )
    if not any(source.glob("*.safetensors")):
        raise SourceRefused(f"{source} has no safetensors files: the converter reads no others")
    if not (source / "tokenizer.json").is_file():
        raise SourceRefused(f"{source} has no tokenizer.json: import it first, and convert what that makes")
    spec = read_spec(source)
    check_plain(source, modules_of(source_spans(source, None)))
    check_sizes(spec)
    return spec


def check_card() -> str:
    """What converts, such as "exllamav2 0.3.2". Raises EngineRefused, saying what to do, where nothing can."""
    if not torch.cuda.is_available():
        raise EngineRefused(
            "converting needs an NVIDIA card, and CUDA finds none: convert on a machine that has one, and copy the "
            "finished model directory here"
        )
    name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    if capability < LEAST_CAPABILITY:
        raise EngineRefused(f"{name} is of sm_{capability[0]}{capability[1]}, exllamav2 needs sm_70 or newer")
    if find_spec("exllamav2") is None:
        raise EngineRefused("converting needs exllamav2: run .venv/bin/pip install '.[gpu]' in Preread's folder")
    check_extension()
    return f"exllamav2 {version('exllamav2')}"


def check_extension() -> None:
    """Raises EngineRefused when exllamav2's extension is neither installed nor can be compiled."""
    from torch.utils.cpp_extension import CUDA_HOME

    if find_spec("exllamav2_ext") is None and CUDA_HOME is None:
        raise EngineRefused(
            "exllamav2 compiles its CUDA extension when it is first used, and there is no CUDA compiler: install the "
            "CUDA toolkit that fits torch, with nvcc, and set CUDA_HOME (see docs/gpu.md)"
        )


def needs(spec: ModelSpec, source: Path, request: Request) -> Needs:
    """What converting `source` takes, from the headers of its files.

    On the card three FP32 copies of the largest matrix are alive at once, beside it in FP16 and the inverse of its
    inputs' Hessian (`AdaptiveGPTQ.quantize`; a head of more than 10^9 weights has no such inverse). In memory the
    states of all rows, before and after a layer.
    """
    matrices = [span for span in source_spans(source, None) if len(span.shape) == 2]
    states = 2 * prod((request.rows.rows, request.rows.row_tokens, spec.hidden_size))
    made = converted_nbytes(spec, matrices, request)
    return Needs(
        card=max(_matrix_nbytes(span) for span in matrices),
        memory=3 * states,
        disk=2 * states + 2 * made + _LOGITS_NBYTES * 4096 * spec.vocab_size,
        published=made,
    )


def converted_nbytes(spec: ModelSpec, matrices: list[TensorSpan], request: Request) -> int:
    """Of the converted weights: layers and head in their bits, the embedding in FP16."""
    table = spec.vocab_size * spec.hidden_size
    layers = sum(prod(span.shape) for span in matrices) - table * (1 if spec.tied_head else 2)
    return round(layers * request.bits / 8 + table * (2 + request.head_bits / 8))


def _matrix_nbytes(span: TensorSpan) -> int:
    return 14 * prod(span.shape) + 4 * min(span.shape) ** 2


def check_room(wanted: Needs, work: Path, models_dir: Path) -> None:
    """Raises SourceRefused or EngineRefused, saying what is missing where."""
    free_on_card, on_card = torch.cuda.mem_get_info(0)
    if wanted.card > free_on_card:
        other = "another card" if wanted.card > on_card else "stop what else uses the card, or take another one"
        raise EngineRefused(
            f"converting takes at least {_gib(wanted.card)} of the card for the largest matrix, and "
            f"{_gib(free_on_card)} of {_gib(on_card)} are free: {other}"
        )
    if wanted.memory > (available := machine_memory().free):
        raise EngineRefused(
            f"converting takes {_gib(wanted.memory)} of memory for the calibration rows, and {_gib(available)} are "
            "free: give fewer with --rows"
        )
    check_disk(wanted, work, models_dir)


def check_disk(wanted: Needs, work: Path, models_dir: Path) -> None:
    """Raises SourceRefused when a disk has too little room."""
    places = {work: wanted.disk}
    if work.stat().st_dev != models_dir.stat().st_dev:
        places[models_dir] = wanted.published
    for place, nbytes in places.items():
        if nbytes > (free := shutil.disk_usage(place).free):
            where = "give another directory with --work, or free some" if place == work else "free some"
            raise SourceRefused(
                f"converting takes {_gib(nbytes)} of disk in {place}, and {_gib(free)} are free: {where}"
            )


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"
