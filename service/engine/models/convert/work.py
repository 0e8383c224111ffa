"""The directory that a conversion works in: what is in it, whose it is, and when it can be gone on with."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from service.engine.models.convert.request import REQUEST_VERSION, Request, difference
from service.engine.models.errors import SourceRefused
from service.engine.models.record import save_record, version_of

REQUEST_NAME = "convert.json"
JOB_NAME = "job_new.json"
"""exllamav2's own name for how far its converter is."""
LOG_NAME = "convert.log"
CALIBRATION_NAME = "calibration.safetensors"
"""`rows` int64 ``[rows, tokens]`` and `measured`, those of them that are measured with."""
HELD_OUT_NAME = "held_out.safetensors"
"""A text's number -> its ids, int64 ``[1, tokens]``."""
REFERENCE_NAME = "reference.safetensors"
"""A text's number -> the source's logits after each of its tokens, FP16 ``[tokens, vocab]``."""
RESULT_NAME = "exl2"
GIVEN_NAME = "measurement.given.json"
MEASURED_NAME = "measurement.json"
_OURS = ("_lock", REQUEST_NAME)


@contextmanager
def held(work: Path) -> Iterator[None]:
    """Hold a work directory, made if it is not there, for this user alone: rows of documents lie in it. Raises
    SourceRefused while another process holds it, or when it has files that no conversion wrote."""
    if work.is_dir() and any(work.iterdir()) and not any((work / name).exists() for name in _OURS):
        raise SourceRefused(f"{work} has files that no conversion wrote: give another directory with --work")
    work.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(work / "_lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SourceRefused(f"another conversion is at work in {work}: wait for it, or give --work") from None
        yield
    finally:
        os.close(lock)


def begin(work: Path, request: Request) -> bool:
    """Whether an earlier conversion is gone on with. One that was cut while it wrote its states begins anew.

    Raises SourceRefused when the directory has another one.
    """
    earlier, job = _earlier(work), read_job(work)
    if earlier is not None and job is not None:
        if differing := difference(earlier, request):
            raise SourceRefused(
                f"{work} has an interrupted conversion of {earlier.source} to {earlier.bits:g} bits, which differs "
                f"in {', '.join(differing)}: ask for the same again to finish it, remove the directory to drop it, "
                "or give another one with --work"
            )
        if "invalid" not in job:
            return True
    clear(work)
    save_record(request, work / REQUEST_NAME)
    return False


def _earlier(work: Path) -> Request | None:
    with suppress(FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        data = (work / REQUEST_NAME).read_bytes()
        return msgspec.json.decode(data, type=Request) if version_of(data) == REQUEST_VERSION else None
    return None


def load_request(work: Path) -> Request:
    """What the conversion in this directory is asked for."""
    return msgspec.json.decode((work / REQUEST_NAME).read_bytes(), type=Request)


def read_job(work: Path) -> dict[str, Any] | None:
    """The converter's job; None where there is none, or none that can be read."""
    try:
        job = json.loads((work / JOB_NAME).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return job if isinstance(job, dict) else None


def save_job(work: Path, job: dict[str, Any]) -> None:
    """Write the job at once, so that no kill leaves half of it."""
    temporary = work / f".{JOB_NAME}"
    with temporary.open("w") as file:
        json.dump(job, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(work / JOB_NAME)


def clear(work: Path) -> None:
    """Remove everything but the lock."""
    for path in work.iterdir():
        if path.name == "_lock":
            continue
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def remove(work: Path) -> None:
    """Remove the directory of a finished conversion."""
    shutil.rmtree(work, ignore_errors=True)
