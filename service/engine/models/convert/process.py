"""Runs the converting process and tells how far it is. It holds the card's memory, and takes it along when it ends."""

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from service.engine.models.convert.work import LOG_NAME
from service.engine.models.errors import EngineRefused, ModelImportError, SourceRefused

CHILD = (sys.executable, "-m", "service.engine.models.convert.child")
Progress = Callable[[str, int, int], None]

_STATUS, _STATUS_END, _ERROR = "[STATUS]", "[/STATUS]", "[ERROR]"
_STAGES = {
    "Reference": "predicting with the source",
    "Measuring": "measuring choices (1 of 2)",
    "Optimizing": "choosing",
    "Quantizing": "quantizing (2 of 2)",
    "Compiling": "writing",
}
_STEPS = 10_000
"""The converter tells shares with four digits."""
_SAID = 12
_FP16 = "activations exceed the range of FP16, which exllamav2 computes in: these weights cannot be converted"
_MEANT = {
    "inference error (1)": "even the most precise choice for a layer is far from it: the weights are damaged, or FP16 "
    "does not hold their activations",
    "inference error (2)": _FP16,
    "inference error (3)": _FP16,
    "Quantization error": "a matrix does not come back from its packed form: another exllamav2 compiled for this torch "
    "may help (docs/gpu.md)",
}


class ConversionFailed(ModelImportError):
    """The converting process ended without a result; what it finished is kept in its work directory."""


def run_child(work: Path, progress: Progress, command: Sequence[str] = CHILD) -> None:
    """Run the conversion in `work` to its end. Its lines go to the log there.

    The child ends with this process, however that ends. Raises ConversionFailed, SourceRefused, EngineRefused with what
    to do.
    """
    log = work / LOG_NAME
    last: deque[str] = deque(maxlen=_SAID)
    error: dict[str, str] = {}
    child = subprocess.Popen(
        [*command, str(work)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True, env=_environment(),
    )  # fmt: skip
    with child, log.open("a", encoding="utf-8") as file:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if line.startswith(_ERROR):
                    error = json.loads(line[len(_ERROR) :])
                elif _STATUS in line:
                    _tell(line, progress)
                else:
                    file.write(line)
                    last.append(line.strip())
            code = child.wait()
        finally:
            child.kill()
            child.wait()  # after Ctrl-C leaving the block waits a quarter of a second only
    if code != 0:
        raise _failure(code, error, last, log)


def _tell(line: str, progress: Progress) -> None:
    _, _, rest = line.partition(_STATUS)
    status = json.loads(rest.partition(_STATUS_END)[0])
    if (stage := _STAGES.get(status["stage"])) is not None:
        progress(stage, round(_STEPS * status["completion"]), _STEPS)


def _environment() -> dict[str, str]:
    """The modules that this process finds, also where they are not installed; lines as they are printed."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}


def _failure(code: int, error: dict[str, str], last: Sequence[str], log: Path) -> ModelImportError:
    kind, message = error.get("kind", ""), error.get("message", "")
    kept = f"what was finished is kept: run the same command to go on; all that was said is in {log}"
    if kind == "refused":
        return SourceRefused(message)
    if kind == "extension":
        return _Extension(
            f"exllamav2 or its CUDA extension cannot be loaded ({message}): install and compile it for this torch, see "
            f"docs/gpu.md; {log} has the whole of it"
        )
    if kind == "memory":
        return ConversionFailed(
            f"the card's memory did not suffice: stop what else uses it, or give fewer calibration rows (--rows); "
            f"{kept}"
        )
    if kind == "disk":
        return ConversionFailed(f"the disk is full: free some, then {kept}")
    said = next((line for line in reversed(last) if line.startswith("##")), "")
    meant = next((text for mark, text in _MEANT.items() if mark in said), "")
    why = meant or message or said.lstrip("# ") or _ended(code)
    return ConversionFailed(f"the converter ended without a result: {why}; {kept}")


class _Extension(EngineRefused, ModelImportError):
    """Both: an engine that does not run, and nothing imported."""


def _ended(code: int) -> str:
    return f"it was killed by signal {-code}" if code < 0 else f"exit code {code}"
