"""The process that converts: `python -m service.engine.models.convert.child WORK`. Nothing of it stays on the card.

It calls the functions of exllamav2's converter in its order, over its job file, with our rows in place of the Parquet
files that its own tokenizing step reads with pandas. Lines of standard output: `[STATUS]{...}[/STATUS]` as the
converter writes them, `[ERROR]{...}` once, and what the converter says.
"""

import errno
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

from service.engine.models.convert import work as files
from service.engine.models.convert.request import Request
from service.engine.models.errors import ModelError

ERROR = "[ERROR]"
_SHARD_MIB = 8192


def main() -> None:
    directory = Path(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        convert(directory)
    except ModelError as error:
        _fail("refused", str(error))
    except OSError as error:
        traceback.print_exc()
        _fail("disk" if error.errno == errno.ENOSPC else "system", str(error))
    except Exception as error:
        traceback.print_exc()
        _fail(_kind(error), f"{type(error).__name__}: {error}")


def convert(directory: Path) -> None:
    """Do what is left of the conversion in this directory. Raises what exllamav2 and torch raise."""
    request = files.load_request(directory)
    job = files.read_job(directory) or new_job(directory, request)
    # transformers first, as everywhere: exllamav2 loads torch's compiler
    from service.engine.models.convert.steps import Steps

    _import_exllamav2()
    Steps(directory, request, job).run()


def new_job(directory: Path, request: Request) -> dict[str, Any]:
    """The job as the converter's functions read it; with a measurement where one was given."""
    rows = request.rows
    job: dict[str, Any] = {
        "in_dir": request.source, "out_dir": str(directory), "cal_dataset": None, "bits": request.bits,
        "head_bits": request.head_bits, "dataset_rows": rows.rows, "measurement_rows": rows.measured_rows,
        "length": rows.row_tokens, "measurement_length": rows.row_tokens, "shard_size": _SHARD_MIB,
        "compile_full": None, "output_measurement": None, "rope_scale": None, "rope_alpha": None,
        "status_output": True, "progress": "reference",
    }  # fmt: skip
    given = directory / files.GIVEN_NAME
    if given.is_file():
        found = json.loads(given.read_bytes())
        job |= {"measurement": found["measurement"], "last_module_idx": found["last_module_idx"]}
        job["reuse_measurement"] = str(given)
    return job


def _import_exllamav2() -> None:
    """Its extension is compiled here, where it is not yet. Interrupting is the parent's work: exllamav2's handler would
    ask on standard input."""
    try:
        # measure.py takes SIGINT over when it is imported
        import exllamav2.conversion.measure  # noqa: F401  # pyright: ignore[reportMissingImports]
    except Exception as error:
        traceback.print_exc()
        _fail("extension", f"{type(error).__name__}: {error}")
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_with_parent() -> None:
    """Standard input ends when the parent does, however that happens."""
    while sys.stdin.buffer.raw.read(1024):  # type: ignore[attr-defined]
        pass
    os._exit(3)


def _kind(error: Exception) -> str:
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or "out of memory" in text.lower():
        return "memory"
    return "disk" if "No space left" in text else "converter"


def _fail(kind: str, message: str) -> NoReturn:
    print(f"{ERROR}{json.dumps({'kind': kind, 'message': message})}", flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
