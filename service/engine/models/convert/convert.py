"""Convert plain weights to EXL2: rows to calibrate on, exllamav2's converter in a process of its own, a check against
the source, and an import of what came out.

    Hugging Face directory or imported model  ->  work directory  ->  <models_dir>/<name>/
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from service.engine.index_heads import HEADS_NAME
from service.engine.models.card import CARD_NAME, KVGate, ModelCard, load_card
from service.engine.models.configs import read_config
from service.engine.models.convert import needs, work
from service.engine.models.convert.calibration import (
    Calibration,
    check_measurement,
    make_calibration,
    read_measurement,
)
from service.engine.models.convert.likeness import Predict, check_likeness, compare
from service.engine.models.convert.process import run_child
from service.engine.models.convert.record import (
    CONVERSION_NAME,
    CONVERSION_VERSION,
    REFUSE_KL,
    Conversion,
    Likeness,
    save_conversion,
)
from service.engine.models.convert.request import REQUEST_VERSION, Request, Rows, check_bits, source_digest
from service.engine.models.errors import ModelNotFound, NameTaken, SourceRefused
from service.engine.models.gates import gate_if_possible
from service.engine.models.heads import FindHeads, heads_if_possible
from service.engine.models.importer import Measure, check_readable, import_model
from service.engine.models.registry import check_name
from service.engine.models.source import Progress, silent
from service.engine.prompt import PromptParts

RunChild = Callable[[Path, Progress], None]
_NOT_KEPT = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5", ".py", ".index.json")
_LARGEST_KEPT = 64 << 20


def _card_predictions(model_dir: Path, card: ModelCard, texts: Sequence[Sequence[int]]) -> list[Any]:
    from service.engine.exl2_engine.predictions import card_predictions

    return card_predictions(model_dir, card, texts)


@dataclass(frozen=True, slots=True)
class Wanted:
    """`own_texts`: of the user's documents. `measurement`: a file that keeps the first half of the work, for other bits
    of the same weights. `most_kl`: mean KL (nats) up to which the result is published."""

    bits: float
    head_bits: int = 6
    own_texts: Sequence[str] = ()
    rows: Rows = field(default_factory=Rows)
    measurement: Path | None = None
    most_kl: float = REFUSE_KL


@dataclass(frozen=True, slots=True)
class Tools:
    """What does the work; tests give others."""

    converter: Callable[[], str] = needs.check_card
    check_room: Callable[[needs.Needs, Path, Path], None] = needs.check_room
    run_child: RunChild = run_child
    predict: Predict = _card_predictions
    measure: Measure = gate_if_possible
    find_heads: FindHeads = heads_if_possible


def default_name(source: Path, bits: float) -> str:
    """A name for what `source` becomes in so many bits, such as "mine-4.25bpw"."""
    first, last = re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).strip("-._") or "model", f"-{bits:g}bpw"
    return first[: 64 - len(last)] + last


def convert_model(
    source: Path,
    wanted: Wanted,
    *,
    name: str,
    models_dir: Path,
    work_dir: Path,
    replace: bool = False,
    progress: Progress = silent,
    tools: Tools | None = None,
) -> ModelCard:
    """Convert the plain weights in `source` and import them as ``models_dir/name``; the card of what came out.

    An interrupted conversion is gone on with when the same is asked for again in the same `work_dir`, which is removed
    at the end. Nothing is published of weights that predict too differently. Raises ModelError and its kinds, OSError.
    """
    tools = tools or Tools()
    check_name(name)
    check_bits(wanted.bits, wanted.head_bits)
    check_measurement(wanted.measurement, work_dir)
    if (models_dir / name).exists() and not replace:
        raise NameTaken(f"there is a model {name} in {models_dir} already; remove it, give --name, or --replace it")
    spec = needs.check_source(source)
    check_readable(source, _prompt(source))
    converter = tools.converter()
    models_dir.mkdir(parents=True, exist_ok=True)
    with work.held(work_dir):
        progress("calibrating", 0, 1)
        calibration = make_calibration(source, wanted.own_texts, wanted.rows, spec.max_positions)
        request = _request(source, wanted, calibration, converter)
        if not work.begin(work_dir, request):
            tools.check_room(needs.needs(spec, source, request), work_dir, models_dir)
            _prepare(work_dir, request, calibration, wanted.measurement)
        progress("calibrating", 1, 1)
        if not (work_dir / work.RESULT_NAME / "config.json").is_file():
            tools.run_child(work_dir, progress)
            _keep_measurement(work_dir, request, wanted.measurement)
            _finish(work_dir, request)
        card = import_model(
            work_dir / work.RESULT_NAME, name=name, models_dir=models_dir, replace=replace, progress=progress,
            measure=_check(work_dir, request, calibration.held_out, wanted.most_kl, tools),
            find_heads=tools.find_heads, prompt=_prompt(source), label=f"{source.name} in {request.bits:g} bits",
        )  # fmt: skip
        work.remove(work_dir)
    return card


def _request(source: Path, wanted: Wanted, calibration: Calibration, converter: str) -> Request:
    return Request(
        format_version=REQUEST_VERSION, source=str(source.absolute()), weights=source_digest(source), bits=wanted.bits,
        head_bits=wanted.head_bits, rows=calibration.rows, calibration=calibration.digest,
        calibrated_on=calibration.label, converter=converter,
    )  # fmt: skip


def _prepare(work_dir: Path, request: Request, calibration: Calibration, measurement: Path | None) -> None:
    calibration.save(work_dir)
    if measurement and (found := read_measurement(measurement, request.measurement_key)):
        (work_dir / work.GIVEN_NAME).write_text(json.dumps(found))


def _keep_measurement(work_dir: Path, request: Request, target: Path | None) -> None:
    if target is None or target.exists():
        return
    found = json.loads((work_dir / work.MEASURED_NAME).read_bytes())
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"key": request.measurement_key, **found}))
    temporary.rename(target)


def _finish(work_dir: Path, request: Request) -> None:
    """Make the converter's weights a Hugging Face directory: the source's other files, and what the weights are now.
    Its config comes last: with it the directory is finished."""
    source, target = Path(request.source), work_dir / work.RESULT_NAME
    for path in target.glob("*.safetensors"):
        path.chmod(0o644)  # the library makes private files; other users of the machine may read a model
    for path in source.iterdir():
        kept = path.is_file() and not path.name.endswith(_NOT_KEPT) and path.stat().st_size <= _LARGEST_KEPT
        if kept and path.name not in (CARD_NAME, HEADS_NAME, CONVERSION_NAME, "config.json"):
            shutil.copyfile(path, target / path.name)
    config = read_config(source)
    # the head is quantized, the embedding is not: they are one matrix no longer
    config |= {"tie_word_embeddings": False, "quantization_config": _quantization(request)}
    temporary = target / ".config.json"
    temporary.write_text(json.dumps(config, indent=1))
    temporary.rename(target / "config.json")


def _quantization(request: Request) -> dict[str, Any]:
    rows = request.rows
    return {
        "quant_method": "exl2", "version": request.converter.partition(" ")[2], "bits": request.bits,
        "head_bits": request.head_bits,
        "calibration": {"rows": rows.rows, "length": rows.row_tokens, "dataset": request.calibration},
    }  # fmt: skip


def _check(work_dir: Path, request: Request, texts: Sequence[Sequence[int]], most_kl: float, tools: Tools) -> Measure:
    """What an import measures, and before it how like the source the weights are: while they are not visible yet."""

    def check(directory: Path, card: ModelCard, told: Progress) -> dict[str, KVGate]:
        told("comparing with the source", 0, 1)
        references = load_file(work_dir / work.REFERENCE_NAME)
        ordered = [references[str(i)] for i in range(len(texts))]
        likeness = _compared(ordered, tools.predict(directory, card, texts), texts)
        told("comparing with the source", 1, 1)
        check_likeness(likeness, most_kl)
        save_conversion(_record(request, card, likeness), directory)
        return tools.measure(directory, card, told)

    return check


def _compared(references: list[Any], found: list[Any], texts: Sequence[Sequence[int]]) -> Likeness:
    try:
        return compare(references, found, texts)
    except ValueError as error:
        raise SourceRefused(
            f"the predictions of the converted weights, or of the source, are no numbers: {error}"
        ) from error


def _record(request: Request, card: ModelCard, likeness: Likeness) -> Conversion:
    return Conversion(
        format_version=CONVERSION_VERSION, weights=card.digests.weights, source=Path(request.source).name,
        bits=request.bits, head_bits=request.head_bits, calibration=request.calibration,
        calibrated_on=request.calibrated_on, rows=request.rows.rows, row_tokens=request.rows.row_tokens,
        converter=request.converter, likeness=likeness,
    )  # fmt: skip


def _prompt(source: Path) -> PromptParts | None:
    """The prompt of a source that was imported before: it may have been imported with a text of its own."""
    try:
        return load_card(source).prompt
    except ModelNotFound:
        return None
