"""What every benchmark here shares: the machine's name, timing with warm-up, cold files, tables in docs/."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PERFORMANCE = ROOT / "docs" / "performance.md"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of repeated runs."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> str:
        return f"{min(self.samples):.3g}-{max(self.samples):.3g}, n={len(self.samples)}"


def timed(work: Callable[[], object], *, repeats: int, warm_up: int = 1) -> Timing:
    """Wall-clock seconds of `repeats` runs after `warm_up` that are not counted."""
    for _ in range(warm_up):
        work()
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        samples.append(time.perf_counter() - started)
    return Timing(tuple(samples))


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def machine() -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return (
        f"{cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"Python {platform.python_version()}, {versions}"
    )


def read_bandwidth() -> float:
    """Bytes a second that all threads read from memory together: best of five sums over 256 MiB."""
    x = torch.ones(64 << 20)
    return x.nbytes / min(timed(x.sum, repeats=5).samples)


def plain_read(files: Sequence[Path]) -> float:
    """Seconds to read the files one after the other, nothing else done with the bytes."""
    buffer = bytearray(8 << 20)
    started = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write_section(name: str, text: str, page: Path = PERFORMANCE) -> None:
    """Replace the section between a page's markers of this name, or append it."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    page_text = page.read_text() if page.exists() else "# Performance\n\nEvery figure here was written by a script.\n"
    if begin in page_text:
        head, rest = page_text.split(begin, 1)
        page_text = head + section + rest.split(end, 1)[1]
    else:
        page_text = f"{page_text.rstrip()}\n\n{section}\n"
    page.write_text(page_text)


def print_json(**figures: object) -> None:
    print(json.dumps(figures))
