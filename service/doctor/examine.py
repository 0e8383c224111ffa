"""Runs the checks."""

from collections.abc import Callable, Sequence
from pathlib import Path

from service.doctor import build_checks, card_checks, machine_checks, model_checks, redis_checks
from service.doctor.context import Context
from service.doctor.findings import Diagnosis, Finding, diagnosis
from service.doctor.probes import Probes
from service.errors import Invalid, ServiceError
from service.settings import Settings

CHECKS: dict[str, Callable[[Context], Finding]] = {
    "off-card": card_checks.off_card,
    "versions": build_checks.versions,
    "kernels": build_checks.kernels,
    "dtype": build_checks.dtype,
    "model": model_checks.model,
    "draft-model": model_checks.draft_model,
    "gptq": model_checks.gptq,
    "cache-size": model_checks.cache_size,
    "host-memory": model_checks.host_memory,
    "other-processes": card_checks.other_processes,
    "throttling": card_checks.throttling,
    "pcie": card_checks.pcie,
    "first-call": card_checks.first_call,
    "paths": machine_checks.paths,
    "swap": machine_checks.swap,
    "threads": machine_checks.threads,
    "disk-speed": machine_checks.disk_speed,
    "disk-room": machine_checks.disk_room,
    "tesseract": machine_checks.tesseract,
    "redis": redis_checks.redis_answers,
    "redis-memory": redis_checks.redis_memory,
    "redis-persistence": redis_checks.redis_persistence,
}


def examine(
    settings: Settings, probes: Probes, *, model_dir: Path | None = None, only: Sequence[str] = ()
) -> Diagnosis:
    """Findings of all checks, or of those in `only`. Raises Invalid for a name that is none."""
    if unknown := [name for name in only if name not in CHECKS]:
        raise Invalid(f"There is no check {unknown[0]!r}: there are {', '.join(CHECKS)}.", param="check")
    context = Context(settings, probes, model_dir or settings.model_dir)
    return diagnosis([_run(name, context) for name in only or CHECKS])


def _run(name: str, context: Context) -> Finding:
    """A check that cannot be made does not stop the others. One that ends with an error nobody foresaw is a warning:
    the check, or what it looked at, is not as it should be."""
    try:
        return CHECKS[name](context)
    except (ServiceError, OSError) as error:
        return Finding(name, "skip", f"could not be looked at: {error}")
    except Exception as error:
        return Finding(
            name,
            "warn",
            f"the check {name} ended with {type(error).__name__}: {error}",
            "look at what the error names; if nothing is wrong with that, it is a fault of the doctor's: report it",
        )
