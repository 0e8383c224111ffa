"""The figures of docs/bench.md, from the runs that are kept in docs/bench."""

from pathlib import Path

from service.bench.report import run_text
from service.bench.results import load_run

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"


def bench_page() -> str:
    """The page with a section of each run."""
    before, _, rest = (DOCS / "bench.md").read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "".join(map(_section, sorted((DOCS / "bench").glob("*.json")))) + END + after


def _section(path: Path) -> str:
    run, name = load_run(path), path.stem
    plot = f"\n![Roofline of {name}](bench/{name}.svg)\n" if path.with_suffix(".svg").exists() else ""
    return f"## {name}, {run.at[:10]}\n\n{run_text(run)}\n{plot}\n"
