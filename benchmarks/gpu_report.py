"""Results that came back from a card, as sections of docs/performance.md.

    python -m benchmarks.gpu_report DIRECTORY [DIRECTORY ...] [--page PAGE]

Every ``*.json`` that a part wrote is read. When several hold the same part, a later one replaces the rows of the same
name and adds its others. Results of dry runs are left out.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.bench_report import PERFORMANCE, table, write_section

ORDER = ("ceilings", "memory", "decode", "speculation", "draft", "prefill", "restore", "resume", "service", "windowed")
ORDER += ("failures", "parity", "convert")
HEADER = ("what", "figure", "spread", "physical bound", "beside it", "target", "met")


def read_results(directories: Iterable[Path]) -> dict[str, dict]:
    """Part -> its merged result, in the order of the page."""
    found: dict[str, dict] = {}
    for directory in directories:
        for path in sorted(directory.rglob("*.json")):
            result = json.loads(path.read_text())
            if isinstance(result, dict) and {"part", "rows", "machine"} <= result.keys() and not result.get("dry"):
                found[result["part"]] = merged(found.get(result["part"]), result)
    known = [part for part in ORDER if part in found]
    return {part: found[part] for part in [*known, *sorted(found.keys() - set(known))]}


def merged(old: dict | None, new: dict) -> dict:
    """`new` over `old`: rows of the same name replaced in place, others behind them. Notes likewise. What failed in an
    earlier run is told on the terminal and left out of the page."""
    if old is None:
        return new
    rows = {}
    for row in old["rows"]:
        if row["figure"].startswith("failed: "):
            print(f"left out, from an earlier run of {old['part']}: {row['what']}: {row['figure']}")
        else:
            rows[row["what"]] = row
    rows |= {row["what"]: row for row in new["rows"]}
    notes = list(dict.fromkeys([*old["notes"], *new["notes"]]))
    return new | {"rows": list(rows.values()), "notes": notes, "raw": old["raw"] | new["raw"]}


def section(result: dict) -> str:
    """A part's section of the page."""
    lines = [f"### {result['part'].capitalize()} (`{result['script']}`)", "", f"{result['machine']}.", ""]
    lines.append(table(HEADER, [cells(row) for row in result["rows"]]))
    if result["notes"]:
        lines += ["", *(f"- {note}" for note in result["notes"])]
    return "\n".join(lines)


def cells(row: dict) -> list[str]:
    met = {True: "yes", False: "**no**", None: ""}[row["met"]]
    texts = [row["what"], row["figure"], row["spread"], row["bound"], row["beside"], row["target"], met]
    return [text.replace("|", "\\|").replace("\n", " ") for text in texts]


HEAD = """## On a GPU

Written by `benchmarks/gpu_*.py` on the card and `benchmarks/gpu_report.py`. Figures are medians after warm-up runs that
are not counted; the spread is least-most and the number of repeats. Speeds of the 27B shape are measured on weights
made up by `benchmarks/gpu_model.py`: speed and memory do not depend on their values."""


def write_page(directories: Iterable[Path], page: Path = PERFORMANCE) -> list[str]:
    """Put all parts found into the page; their names."""
    results = read_results(directories)
    if results:
        write_section("gpu", HEAD, page)
    for part, result in results.items():
        write_section(f"gpu {part}", section(result), page)
    return list(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("--page", type=Path, default=PERFORMANCE)
    arguments = parser.parse_args()
    parts = write_page(arguments.directories, arguments.page)
    print(f"{arguments.page}: {', '.join(parts) or 'no results found'}")


if __name__ == "__main__":
    main()
