"""The plot of the fidelity page: recovery over ratio, as an SVG file."""

import math
from collections.abc import Sequence

from benchmarks.fidelity_parts.summary import Line, Report

WIDTH, HEIGHT, LEFT, TOP, PANEL_W, PANEL_H, GAP = 860, 570, 56, 40, 350, 190, 70
PANELS = (
    ("prose", "names in prose"),
    ("strings", "codes and UUIDs"),
    ("cell", "table cells"),
    ("aggregate", "aggregates"),
)
CURVES = (
    ("sinks + window", "#999999", ""),
    ("key norm", "#c49a3a", ""),
    ("selection: replay", "#1f6fb2", ""),
    ("selection, per layer", "#2a9d55", ""),
    ("selection, per head", "#0d7377", ""),
    ("hybrid, per layer", "#b23a48", ""),
    ("text by BM25, read afresh", "#7a4fa3", "2 3"),
    ("selection: replay + fetch", "#1f6fb2", "6 3"),
    ("sinks + window + fetch", "#999999", "6 3"),
)
LOW, HIGH = -0.2, 1.05


def plot(report: Report) -> str:
    """An SVG of four panels, one per group of questions."""
    parts = [_text(LEFT, 18, "Recovery (1: as with the whole cache, 0: as without the document) by ratio of rows", 13)]
    for i, (group, title) in enumerate(PANELS):
        x, y = LEFT + (i % 2) * (PANEL_W + GAP), TOP + (i // 2) * (PANEL_H + 50)
        parts += _panel(x, y, title)
        for method, colour, dashes in CURVES:
            parts += _curve(x, y, _points(report.lines, method, group), colour, dashes)
    parts += _legend()
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _points(lines: Sequence[Line], method: str, group: str) -> list[tuple[float, float]]:
    found = [
        (line.ratio, line.groups[group].recovery) for line in lines if line.method == method and group in line.groups
    ]
    return sorted(found)


def _panel(x: float, y: float, title: str) -> list[str]:
    parts = [_text(x, y - 6, title, 12)]
    for value in (0, 0.25, 0.5, 0.75, 1):
        at = _y(y, value)
        parts.append(f'<line x1="{x}" y1="{at:.1f}" x2="{x + PANEL_W}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(_text(x - 30, at + 4, f"{value:g}", 11))
    parts += [_text(_x(x, ratio) - 8, y + PANEL_H + 15, f"{ratio}x", 11) for ratio in (1, 2, 4, 8, 16, 32)]
    return parts


def _curve(x: float, y: float, points: Sequence[tuple[float, float]], colour: str, dashes: str) -> list[str]:
    if not points:
        return []
    places = [(_x(x, ratio), _y(y, value)) for ratio, value in points]
    line = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
    dots = [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{colour}"/>' for px, py in places]
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"{dashed}/>', *dots]


def _legend() -> list[str]:
    parts = []
    for i, (method, colour, dashes) in enumerate(CURVES):
        x, y = LEFT + (i % 4) * 200, HEIGHT - 42 + (i // 4) * 16
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" stroke="{colour}" stroke-width="2"{dashed}/>')
        parts.append(_text(x + 30, y + 4, method.replace("selection: replay", "selection"), 11))
    return parts


def _x(left: float, ratio: float) -> float:
    return left + PANEL_W * math.log2(ratio) / 5


def _y(top: float, value: float) -> float:
    return top + PANEL_H * (HIGH - min(max(value, LOW), HIGH)) / (HIGH - LOW)


def _text(x: float, y: float, text: str, size: int) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{text}</text>'
