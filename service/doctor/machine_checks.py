"""Checks of the machine: paths, swap, cores, disk, text recognition."""

import shutil
import sys
from pathlib import Path

from ingest.ocr import find_recognizer
from service.core.adapters import parse_limits
from service.doctor.context import Context
from service.doctor.findings import Finding
from service.engine.ledger import GIB

_SWAP_NBYTES = 256 << 20
_OURS_NBYTES = 64 << 20
"""Of a process in swap: some pages that nobody has used for hours go there on any machine that has swap."""


def paths(context: Context) -> Finding:
    """Blanks in paths: tools that compile kernels, and many scripts, break at them."""
    say, environment = context.finding("paths"), context.probes.environment()
    looked_at = {
        "PREREAD_DATA_DIR": str(context.settings.data_dir),
        "the model": str(context.model_dir),
        "Python": sys.executable,
        **{name: environment.get(name, "") for name in ("TORCH_EXTENSIONS_DIR", "CUDA_HOME", "TRITON_CACHE_DIR")},
    }
    blank = [f"{name} is {path!r}" for name, path in looked_at.items() if any(c.isspace() for c in path)]
    if blank:
        return say.warn(
            f"{'; '.join(blank)}: with a blank in it",
            "move it to a path without blanks: Preread reads such paths, but compilers of kernels may not",
        )
    return say.ok("no blanks in the paths of data, model, Python and caches")


def swap(context: Context) -> Finding:
    """Whether memory that is computed with lies on the disk."""
    say, memory = context.finding("swap"), context.probes.memory()
    if much := {pid: n for pid, n in memory.swapped.items() if n >= _OURS_NBYTES}:
        whose = ", ".join(f"pid {pid}: {n / 2**20:.0f} MiB" for pid, n in much.items())
        return say.fail(
            f"parts of Preread lie in swap ({whose})",
            f"{_less(context)}end what else takes memory, then restart; `swapoff -a` keeps it from coming back",
        )
    if memory.swap_used_nbytes > _SWAP_NBYTES:
        return say.warn(
            f"{memory.swap_used_nbytes / GIB:.2f} of {memory.swap_total_nbytes / GIB:.2f} GiB of swap in use, "
            f"{memory.available_nbytes / GIB:.1f} GiB of memory available",
            "end what else takes memory: documents that are swapped out are slower than computing them again",
        )
    return say.ok(f"{memory.swap_used_nbytes / 2**20:.0f} MiB of swap in use")


def _less(context: Context) -> str:
    """The setting by which this engine takes less of the machine's memory, if there is one."""
    if context.on_card:
        return "lower PREREAD_HOST_BYTES or "
    return "" if context.offloads else "lower PREREAD_RESIDENT_BYTES or "


def threads(context: Context) -> Finding:
    """Whether more threads compute than cores are there for them: they wait for each other."""
    say, cores = context.finding("threads"), context.probes.cores()
    asked = context.settings.threads or _omp_threads(context) or _own_threads(context, cores)
    if asked > max(cores, 1):
        return say.warn(
            f"{asked} threads compute on {cores:g} cores",
            f"set PREREAD_THREADS={max(1, int(cores))}: threads without a core keep the others waiting",
        )
    return say.ok(f"threads: {asked}, cores: {cores:g}")


def _own_threads(context: Context, cores: float) -> int:
    """The llamacpp engine looks at a container's share."""
    threads = context.probes.default_threads()
    return min(threads, max(1, int(cores))) if context.settings.engine == "llamacpp" else threads


def _omp_threads(context: Context) -> int:
    value = context.probes.environment().get("OMP_NUM_THREADS", "")
    return int(value) if value.isdigit() else 0


def disk_speed(context: Context) -> Finding:
    """Whether a document comes back from the disk faster than it is computed."""
    say, plan, prefill = context.finding("disk-speed"), context.plan(), context.prefill_tok_s()
    if isinstance(plan, str) or prefill is None:
        return say.skip(plan if isinstance(plan, str) else "nothing is known of prefill")
    directory = _existing(context.settings.store_dir)
    try:
        gbps = context.probes.read_gbps(directory)
    except OSError as error:
        return say.fail(
            f"{directory} cannot be written: {error.strerror}", "free some disk, or choose another data dir"
        )
    tok_s, measured = prefill
    needed = plan.kv_bytes_per_token.stored * tok_s / 1e9
    seen = (
        f"{directory} reads {gbps:.2f} GB/s; a snapshot pays above {needed:.3f} GB/s, at {tok_s:.0f} tokens of "
        f"prefill a second ({'measured' if measured else 'estimated'})"
    )
    if gbps < needed:
        return say.fail(
            seen, "put PREREAD_DATA_DIR on a faster disk: this one restores more slowly than it is computed"
        )
    return say.ok(seen)


def disk_room(context: Context) -> Finding:
    """Whether snapshots can still be written."""
    say, settings = context.finding("disk-room"), context.settings
    free, place = min((shutil.disk_usage(place).free, place) for place in _disks(settings.data_dir, settings.store_dir))
    # No plan is needed to see that even the floor is not free, and making one may fail.
    plan = context.plan() if free >= settings.free_floor_bytes else ""
    one = 0 if isinstance(plan, str) else plan.snapshot_nbytes
    if free < settings.free_floor_bytes + one:
        return say.fail(
            f"{free / GIB:.2f} GiB free in {place}; {settings.free_floor_bytes / GIB:.2f} stay free"
            f"{f', and a snapshot of this size takes {one / GIB:.2f}' if one else ''}",
            "free some disk, or `preread snapshots evict`",
        )
    return say.ok(f"{free / GIB:.1f} GiB free")


def _disks(*paths: Path) -> list[Path]:
    """One directory of each disk: the store may be mounted below the data directory."""
    return list({place.stat().st_dev: place for place in map(_existing, paths)}.values())


def _existing(path: Path) -> Path:
    """The path, or the nearest one above it that is there."""
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


def tesseract(context: Context) -> Finding:
    """Whether scanned pages can be read."""
    say, languages = context.finding("tesseract"), context.settings.ocr_languages
    recognizer, how = find_recognizer(parse_limits(context.settings))
    if how == "off":
        return say.skip("PREREAD_OCR_LANGUAGES=none: scans are not read")
    if how == "absent":
        return say.warn("Tesseract is not installed: scanned pages are not read", "apt-get install tesseract-ocr")
    if recognizer is None or recognizer.missing:
        missing = recognizer.missing if recognizer else tuple(languages.split("+"))
        packages = " ".join(f"tesseract-ocr-{name}" for name in missing)
        return say.warn(f"Tesseract lacks {', '.join(missing)} of {languages}", f"apt-get install {packages}")
    return say.ok(f"Tesseract reads {languages}")
