"""Writes the figures of docs/capacity.md."""

from collections.abc import Sequence
from typing import Any

from benchmarks.bench_report import ROOT, machine, table, write_section
from benchmarks.capacity_parts.compare import HEADER
from benchmarks.capacity_parts.profiles import CARD_16, CPU, H200
from benchmarks.capacity_parts.scenarios import (
    BREAK_HEADER,
    DAILY,
    FIRST_P95_S,
    SIZE_HEADER,
    TIME_HEADER,
    Sized,
    break_rows,
    size_rows,
    time_rows,
)

PAGE = ROOT / "docs" / "capacity.md"


def tables(of: list[Sized]) -> str:
    """What is needed, what users see, and what breaks first."""
    return "\n\n".join(
        (
            f"As many workers as it takes, in the busiest hour, for 19 of 20 first tokens within {FIRST_P95_S:g} s and "
            f"for a quarter of the places to be free. A user asks {DAILY:g} questions a day.",
            table(SIZE_HEADER, size_rows(of)),
            "In the busiest hour, and where questions find their documents:",
            table(TIME_HEADER, time_rows(of)),
            "How much of one Redis and of one PostgreSQL that takes:",
            table(BREAK_HEADER, break_rows(of)),
        )
    )


def write_tables(of: list[Sized]) -> None:
    write_section("capacity", tables(of), PAGE)
    facts = [(one.name, *fact) for one in (CPU, CARD_16, H200) for fact in one.facts]
    write_section("capacity machines", table(("machine", "what", "figure", "from"), facts), PAGE)


def write_simulated(text: str) -> None:
    write_section("capacity simulated", text, PAGE)


def write_check(calibration: str, rows: Sequence[tuple[object, ...]], runs: Sequence[Any]) -> None:
    """`runs` are those of `check.Run`."""
    answers = sum(run.n_asked for run in runs)
    spent = {kind: sum(run.spent[kind] for run in runs) / answers for kind in runs[0].spent}
    commits = spent.pop("commits")
    costs = ", ".join(f"{kind} {seconds * 1e3:.0f} ms" for kind, seconds in spent.items())
    tokens = sum(run.n_tokens for run in runs) / answers
    said = f"A question, of {tokens:.0f} tokens in the mean, took {costs} of processor time, and {commits:.1f} commits."
    text = "\n\n".join((f"{machine()}.", calibration, table(HEADER, rows), said))
    write_section("capacity check", text, PAGE)
