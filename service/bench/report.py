"""A run, and two runs side by side, as Markdown tables."""

from collections.abc import Iterable, Sequence

from service.bench.results import Change, Row, Run


def run_text(run: Run) -> str:
    """All figures of a run."""
    place = ", ".join(f"{name} {value}" for name, value in run.place.items() if value)
    ceilings = f"memory {run.bandwidth_gbps:.1f} GB/s, products {run.tflops:.3g} TFLOP/s" if run.bandwidth_gbps else ""
    header = ("what", "median", "spread", "GB/s", "bound", "share")
    lines = [f"{place}. {ceilings}".strip(), "", _table(header, [_cells(row) for row in run.rows])]
    if run.left_out:
        lines += ["", _table(("not measured", "why"), [(part.name, part.why) for part in run.left_out])]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    gbps = f"{row.gbps:.2f}" if row.gbps else ""
    bound, share = (f"{row.bound:.4g} {row.unit}", f"{row.share:.0%}") if row.bound else ("", "")
    return row.name, f"{row.value:.4g} {row.unit}", f"{row.spread}, n={len(row.samples)}", gbps, bound, share


def changes_text(changes: Iterable[Change], differences: Sequence[str]) -> str:
    """What is better and what is worse than before."""
    rows = [(c.name, f"{c.before:.4g} {c.unit}", *_now(c)) for c in changes]
    told = [f"Not the same: {text}" for text in differences]
    return "\n".join([*told, *([""] if told else []), _table(("what", "before", "now", "better by"), rows)])


def _now(change: Change) -> tuple[str, str]:
    if change.now is None or change.better_by is None:
        return "not measured", ""
    return f"{change.now:.4g} {change.unit}", f"{change.better_by:+.1%}"


def length_text(seconds: float) -> str:
    """About so long, for people."""
    return f"{max(round(seconds), 1)} s" if seconds < 90 else f"{round(seconds / 60)} min"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
