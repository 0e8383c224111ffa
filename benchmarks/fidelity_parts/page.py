"""The section of docs/fidelity.md about kept rows."""

from collections.abc import Callable, Sequence

from benchmarks.bench_report import table
from benchmarks.fidelity_parts.summary import Line, Report

GROUP_NAMES = (
    ("prose", "names in prose"),
    ("strings", "codes and UUIDs"),
    ("cell", "table cells"),
    ("aggregate", "aggregates"),
)

SHOWN = {"selection: replay": "selection, equal counts", "selection: replay + fetch": "selection, equal counts + fetch"}
MAIN = (
    "sinks + window",
    "key norm",
    "selection: replay",
    "selection, per layer",
    "selection, per layer by its best head",
    "selection, per head",
    "hybrid",
    "hybrid, per layer",
    "spans by Quest bounds, equal rows",
    "spans by index heads, equal rows",
    "text by BM25, read afresh",
)


def section(report: Report) -> str:
    """All tables of a run."""
    ratios = sorted({line.ratio for line in report.lines if line.ratio > 1})
    methods = [m for m in dict.fromkeys(line.method for line in report.lines) if m not in ("full", "no document")]
    main = [m for m in methods if m.removesuffix(" + fetch") in MAIN]
    parts = ["### The figures", _head(report)]
    for group, name in GROUP_NAMES:
        parts += [
            f"#### Recovery: {name}",
            _by_ratio(report.lines, main, ratios, lambda line, g=group: _recovery(line, g)),
        ]
    parts += [
        "#### KL to the full cache, all answer tokens",
        "Mean / 99th percentile in nats, and the share of tokens with the same first choice.",
    ]
    parts.append(_by_ratio(report.lines, main, ratios, _divergence))
    found = [m for m in methods if any(line.method == m and line.found is not None for line in report.lines)]
    if found:
        parts += [
            "#### Whole fact among the fetched or always resident tokens",
            "Share of the questions that have one place in the document, and how many tokens were fetched on average.",
            _by_ratio(report.lines, found, ratios, _found),
        ]
    others = [m for m in methods if m not in main]
    if others:
        parts += ["#### Variants", "Recovery of names / strings / aggregates. *selection: ...* has equal counts."]
        parts.append(_by_ratio(report.lines, [*others, *[m for m in main if "selection" in m]], ratios, _three))
    noted = [line for line in report.lines if line.notes]
    if noted:
        parts += [
            "#### What the fits chose",
            "Errors are relative squared errors of the attention's output on replayed queries that were not fitted on.",
            _notes(noted),
        ]
    return "\n\n".join(part for part in parts if part)


def _head(report: Report) -> str:
    tokens = f"{min(report.document_tokens):,} to {max(report.document_tokens):,}"
    whole = next((line for line in report.lines if line.ratio == 1 and line.method == "selection: replay"), None)
    exact = f" At ratio 1 selection reproduces the full cache: mean KL {whole.mean_kl:.1e}." if whole else ""
    figures = table(
        ("", *(name for _, name in GROUP_NAMES)),
        [
            ("the whole cache", *(f"{report.full.get(g, 0):.2f}" for g, _ in GROUP_NAMES)),
            ("no document", *(f"{report.none.get(g, 0):.2f}" for g, _ in GROUP_NAMES)),
        ],
    )
    return f"""\
{len(report.documents)} documents of {tokens} tokens, {report.n_questions} questions, {report.model}, FP32, \
{report.machine}, seed {report.seed}, {report.seconds:.0f} s.{exact}

Means ± standard error over the documents. NLL of the asked value, nats:

{figures}"""


def _by_ratio(lines: Sequence[Line], methods: Sequence[str], ratios: Sequence[int], cell: Callable[[Line], str]) -> str:
    at = {(line.method, line.ratio): line for line in lines}
    rows = [[SHOWN.get(m, m), *(cell(at[m, r]) if (m, r) in at else "" for r in ratios)] for m in methods]
    return table(("", *(f"{r}x" for r in ratios)), [row for row in rows if any(row[1:])])


def _recovery(line: Line, group: str) -> str:
    found = line.groups.get(group)
    return f"{_two(found.recovery)} ± {found.spread:.2f}" if found else ""


def _three(line: Line) -> str:
    groups = (line.groups.get(g) for g in ("prose", "strings", "aggregate"))
    return " / ".join(_two(g.recovery) if g else "" for g in groups)


def _two(value: float) -> str:
    """Two decimals, without a minus before zero."""
    return f"{round(value, 2) + 0:.2f}"


def _divergence(line: Line) -> str:
    return f"{line.mean_kl:.2g} / {line.p99_kl:.2g} / {100 * line.same:.0f} %"


def _found(line: Line) -> str:
    return f"{100 * line.found:.0f} %, {line.fetched:.0f}" if line.found is not None else ""


def _notes(lines: Sequence[Line]) -> str:
    names = list(lines[0].notes)
    rows = [(f"{line.method}, {line.ratio}x", *(f"{line.notes.get(n, 0):.3g}" for n in names)) for line in lines]
    return table(("", *names), rows)
