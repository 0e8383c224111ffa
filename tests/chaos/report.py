"""What came of the cases, as lines and as the tables of docs/faults.md.

python -m tests.chaos.report FILE ...    add to the page what runs with `--json FILE` saw, on whatever machine
python -m tests.chaos.report --section "faults elsewhere" FILE ...      to another table, for another machine begins a
                                                                        table anew
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from tests.chaos.asking import Seen
from tests.chaos.cases import FAULTS
from tests.chaos.chaos import Tally
from tests.postgres import program

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
HEADER = (
    "case", "what happens", "times", "right answers", "what users were told besides", "read again", "longest wait",
    "a round",
)  # fmt: skip
_WRITING = threading.Lock()
_FIGURES = ("n_rounds", "n_read_again", "seconds", "failure")


def line_of(case: str, tally: Tally) -> str:
    """For people who watch."""
    end = f"FAILED in round {tally.n_rounds + 1}: {tally.failure}" if tally.failure else "nothing lost or wrong"
    seen, again = tally.seen, f"{tally.n_read_again} documents read again"
    return (
        f"{case}: {tally.n_rounds} rounds, {tally.seconds:.0f} s; {seen.n_answers} right answers; told to ask again: "
        f"{_told(tally)}; {again}; longest wait {seen.longest_s:.1f} s; {end}"
    )


def write(case: str, tally: Tally, arguments: argparse.Namespace) -> None:
    """Add rounds of a case to its row in the table, as long as versions and machine are those of the table; otherwise
    that begins anew. The row of a case that failed goes: it is counted anew once that is put right."""
    with _WRITING:
        _write_row(_section(arguments), _head(arguments), case, tally)


def save(case: str, tally: Tally, arguments: argparse.Namespace) -> None:
    """The same as a line of `arguments.json`, which several runs at once may have in parts."""
    seen = {"told": dict(tally.seen.told), "n_answers": tally.seen.n_answers, "longest_s": tally.seen.longest_s}
    own = {name: getattr(tally, name) for name in _FIGURES}
    line = {"section": _section(arguments), "head": _head(arguments), "case": case, "seen": seen, **own}
    with _WRITING, arguments.json.open("a") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def merged(lines: Iterable[str]) -> dict[tuple[str, str, str], Tally]:
    """By section of the page, its head and case, the sum of what was saved."""
    tallies: dict[tuple[str, str, str], Tally] = {}
    for line in map(json.loads, lines):
        seen = line["seen"] | {"told": Counter(line["seen"]["told"])}
        tally = Tally(**{name: line[name] for name in _FIGURES}, seen=Seen(**seen))
        tallies.setdefault((line["section"], line["head"], line["case"]), Tally()).add(tally)
    return tallies


def main(words: Sequence[str]) -> int:
    """The exit status: 1 when a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--section", help="the table of the page, where it is another than that of the run")
    arguments = parser.parse_args(words)
    tallies = merged(line for path in arguments.files for line in path.read_text().splitlines())
    for (section, head, case), tally in tallies.items():
        print(line_of(case, tally))
        _write_row(arguments.section or section, head, case, tally)
    return int(any(tally.failure for tally in tallies.values()))


def _section(arguments: argparse.Namespace) -> str:
    return f"faults{' with a model' if arguments.model else ''}{' of 30 s' if arguments.stall >= 30 else ''}"


def _write_row(section: str, head: str, case: str, tally: Tally) -> None:
    from benchmarks.bench_report import table, write_section  # it loads torch, which tests do not need

    rows = _rows(section, head)
    if before := rows.pop(f"`{case}`", None):
        tally = added(tally, before)
    if not tally.failure:
        rows[f"`{case}`"] = row_of(case, tally)
    ordered = [rows[f"`{name}`"] for name in FAULTS if f"`{name}`" in rows]
    write_section(section, f"{head}\n\n{table(HEADER, ordered)}", PAGE)


def _told(tally: Tally) -> str:
    told = tally.seen.told.most_common()
    return ", ".join(f"{n} × {what}" for what, n in told) or "nothing"


def row_of(case: str, tally: Tally) -> list[str]:
    """Cells as in HEADER."""
    seen = tally.seen
    return [
        f"`{case}`", FAULTS[case].what, str(tally.n_rounds), str(seen.n_answers), _told(tally), str(tally.n_read_again),
        f"{seen.longest_s:.1f} s", f"{tally.seconds / max(tally.n_rounds, 1):.1f} s",
    ]  # fmt: skip


def added(tally: Tally, row: list[str]) -> Tally:
    """A tally together with what a row of the page says."""
    times, told = int(row[2]), [part.split(" × ") for part in row[4].split(", ") if " × " in part]
    seen = Seen(Counter({what: int(n) for n, what in told}), int(row[3]), float(row[6].split()[0]))
    seen.add(tally.seen)
    seconds = tally.seconds + times * float(row[7].split()[0])
    return Tally(tally.n_rounds + times, tally.n_read_again + int(row[5]), seconds, seen, tally.failure)


def _rows(section: str, head: str) -> dict[str, list[str]]:
    """Those of the page, by case."""
    text = PAGE.read_text() if PAGE.exists() else ""
    part = text.partition(f"<!-- {section}: begin -->")[2].partition(f"<!-- {section}: end -->")[0]
    if head not in part:
        return {}
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {row[0]: row for row in cells}


def _head(arguments: argparse.Namespace) -> str:
    from benchmarks.bench_report import cpu_name

    engine = "the torch engine with the demo model, FP32" if arguments.model else "the fake engine"
    return (
        f"{arguments.apis} API processes and {arguments.workers} workers with {engine}; what stands still does so for "
        f"{arguments.stall:g} s. {cpu_name()}, {len(os.sched_getaffinity(0))} cores shared with other work; Python "
        f"{sys.version.split()[0]}, {_said('redis-server', '--version')}, {_said(program('postgres'), '--version')}, "
        f"moto {version('moto')}."
    )


def _said(*command: str) -> str:
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "v=" in text:
        return "Redis " + text.split("v=")[1].split()[0]
    return text.replace("postgres (PostgreSQL)", "PostgreSQL").split("(")[0].strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
