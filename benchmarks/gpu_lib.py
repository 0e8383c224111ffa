"""What the benchmarks on a card share: results that survive a time limit, the card's name, its ceilings."""

import argparse
import functools
import json
import os
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.bench_report import Timing, machine

ON_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CARD else "cpu")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a part's table. `bound`: the physical limit of this figure. `met`: whether the target is, None
    without one. `must`: a target of behaviour, not of speed: it holds in a dry run too."""

    what: str
    figure: str
    spread: str = ""
    bound: str = ""
    beside: str = ""
    target: str = ""
    met: bool | None = None
    must: bool = False


class Result:
    """A part's rows, written to ``<out>/<part>.json`` after each of them, so that a killed part keeps what it has."""

    def __init__(self, part: str, script: str, arguments: argparse.Namespace) -> None:
        self.part = part
        self.raw: dict[str, object] = {}
        self._script = script
        self._arguments = arguments
        self._rows: list[Row] = []
        self._notes: list[str] = []
        self._started = time.perf_counter()
        self._path = Path(arguments.out) / f"{part}.json"
        self.save()

    @property
    def left_s(self) -> float:
        """Seconds until the part's limit."""
        return self._arguments.limit_s - (time.perf_counter() - self._started)

    def add(self, row: Row) -> None:
        """A dry run meets and misses no target of speed."""
        if self._arguments.dry and row.target and not row.must:
            row = replace(row, met=None)
        self._rows.append(row)
        spent = time.perf_counter() - self._started
        met = {True: "met", False: "MISSED", None: ""}[row.met]
        print(
            f"[{self.part} {spent:6.1f} s] {row.what}: {row.figure} | {row.spread} | {row.bound} | {row.beside} {met}",
            flush=True,
        )
        self.save()

    def note(self, text: str) -> None:
        """A sentence for the page, below the table."""
        self._notes.append(text)
        print(f"[{self.part}] {text}", flush=True)
        self.save()

    def attempt(self, what: str, work: Callable[[], object], *, needs_s: float = 0.0) -> bool:
        """Do `work` when at least `needs_s` seconds are left. Its error becomes a row, and the part goes on."""
        if self.left_s < needs_s:
            self.note(f"{what}: not run, {needs_s:.0f} s are needed and {self.left_s:.0f} s were left")
            return False
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            first_line = (str(error).splitlines() or [""])[0]
            self.add(Row(what, f"failed: {type(error).__name__}: {first_line[:160]}", met=False))
            self._end_if_lost()
            return False
        return True

    def _end_if_lost(self) -> None:
        """After a fault of the card nothing in this process can work: the part ends. Raises SystemExit."""
        try:
            sync()
        except Exception:
            self.note("The card answered no more calls after that: what would have followed was not run.")
            raise SystemExit(3) from None

    def save(self) -> None:
        found = {
            "part": self.part,
            "script": self._script,
            "dry": self._arguments.dry,
            "machine": card(),
            "seconds": round(time.perf_counter() - self._started, 1),
            "rows": [asdict(row) for row in self._rows],
            "notes": self._notes,
            "raw": self.raw,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(found, indent=1))


def parse(description: str | None, extra: Callable[[argparse.ArgumentParser], object] | None = None):
    """The arguments that every part has, and its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "gpu-results"), help="where the JSON goes ($OUT)")
    parser.add_argument("--limit-s", type=float, default=600.0, help="start nothing that would end after this")
    parser.add_argument(
        "--dry", action="store_true", help="a tiny model on any device: tries the script, not the speed"
    )
    parser.add_argument("--work", default=os.environ.get("BENCH_WORK", "/tmp/preread-bench"), help="models, snapshots")
    if extra is not None:
        extra(parser)
    return parser.parse_args()


@functools.cache
def card() -> str:
    """The card, its driver and the versions that matter; the processor when there is none."""
    names = ("triton", "exllamav2")
    versions = "".join(f", {name} {_version(name)}" for name in names)
    if not ON_CARD:
        return machine() + versions
    return (
        f"{torch.cuda.get_device_name(0)} ({torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB), driver "
        f"{_driver()}, CUDA {torch.version.cuda}; {machine()}{versions}"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def sync() -> None:
    if ON_CARD:
        torch.cuda.synchronize()


def device_timed(work: Callable[[], object], *, repeats: int, warm_up: int = 2) -> Timing:
    """Seconds of `work` on the device, by events around it (wall clock without a card)."""
    for _ in range(warm_up):
        work()
    sync()
    if not ON_CARD:
        return Timing(tuple(_wall(work) for _ in range(repeats)))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for first, last in pairs:
        first.record()
        work()
        last.record()
    sync()
    return Timing(tuple(first.elapsed_time(last) / 1e3 for first, last in pairs))


def wall_timed(work: Callable[[], object], *, repeats: int, warm_up: int = 2) -> Timing:
    """Wall-clock seconds of `work` with the device idle before and after."""
    for _ in range(warm_up):
        work()
    sync()
    return Timing(tuple(_wall(work) for _ in range(repeats)))


def _wall(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    sync()
    return time.perf_counter() - started


def copy_ceiling(nbytes: int = 4 << 30) -> float:
    """Bytes a second that a copy on the device moves, read and written ones both counted: best of ten."""
    nbytes = nbytes if ON_CARD else 64 << 20
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * nbytes / min(device_timed(lambda: target.copy_(source), repeats=10).samples)


def pinned_ceiling(nbytes: int = 1 << 30) -> float:
    """Bytes a second from pinned host memory to the device: best of five."""
    nbytes = nbytes if ON_CARD else 16 << 20
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=ON_CARD).fill_(7)
    target = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    return nbytes / min(device_timed(lambda: target.copy_(source, non_blocking=True), repeats=5).samples)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def spread(values: Sequence[float], unit: float = 1.0, digits: int = 3) -> str:
    """ "least-most, n=count"."""
    return f"{min(values) * unit:.{digits}g}-{max(values) * unit:.{digits}g}, n={len(values)}"


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
