"""What `make fuzz` writes into docs/robustness.md, between marks; the rest of the page stays."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.fuzz.seeds import NAMES
from tests.fuzz.uploads import Tally, Watched

PAGE = Path(__file__).parents[2] / "docs" / "robustness.md"
_READERS = ("pypdf", "pypdfium2", "python-docx", "selectolax", "defusedxml", "markdown-it-py", "charset-normalizer")


def write_uploads(tally: Tally, seen: Watched, seed: int) -> None:
    """The figures of a run of damaged files."""
    kinds = sorted({outcome for _, outcome in tally.outcomes}, key=lambda kind: (kind != "ready", kind))
    rows = [
        f"| {kind} | " + " | ".join(str(tally.outcomes[name, kind]) for name in NAMES) + " |"
        for kind in kinds
    ]  # fmt: skip
    totals = [sum(count for (name, _), count in tally.outcomes.items() if name == each) for each in NAMES]
    slowest = [f"{tally.slowest.get(each, 0.0):.1f} s" for each in NAMES]
    lines = [
        f"{tally.total} files with seed {seed}, {tally.seconds / 60:.0f} minutes, {tally.questions} of them asked a "
        f"question; failures: {len(tally.failures)}. {machine()}",
        "",
        "| outcome | " + " | ".join(NAMES) + " |",
        "|---|" + "---|" * len(NAMES),
        *rows,
        "| all | " + " | ".join(map(str, totals)) + " |",
        "| longest | " + " | ".join(slowest) + " |",
        "",
        f"Memory: the server {seen.server_before >> 20} MiB before and {seen.server >> 20} MiB at most, its engine "
        f"(fake) {seen.engine >> 20} MiB, a process that reads a document {seen.reader >> 20} MiB; at most "
        f"{seen.most_readers} of these at once. "
        + "Readers: " + ", ".join(f"{name} {version(name)}" for name in _READERS) + ".",
    ]  # fmt: skip
    put("uploads", lines)


def write_schema(report: dict[str, Any], seed: int, errors: list[str]) -> None:
    """The figures of a run of schemathesis, from its own report."""
    operations, cases = report["operations"], report["test_cases"]
    phases = ", ".join(f"{name}: {phase['status']}" for name, phase in report["phases"].items())
    failures = [f"- {failure['title']}: {', '.join(failure['operations'])}" for failure in report["failures"]]
    lines = [
        f"{cases['generated']:,} requests with seed {seed} to {operations['tested']} of {operations['total']} calls in "
        f"{report['running_time'] / 60:.0f} minutes ({phases}; there are no examples in the schema); failures: "
        f"{len(failures)}; errors in the server's log: {len(errors)}. {machine()} schemathesis "
        f"{report['schemathesis_version']}, hypothesis {version('hypothesis')}.",
        *failures,
    ]
    put("schema", lines)


def put(name: str, lines: list[str]) -> None:
    """Replaces what stands between the marks of `name`."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = PAGE.read_text().partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(before + "\n".join([begin, *lines, end]) + after)


def machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    today = datetime.now(UTC).date().isoformat()
    return f"{today}, {cores} cores ({platform.machine()}), {platform.system()}, Python {platform.python_version()}."
