"""The plot of the fidelity page: recovery over ratio, as an SVG file."""

import math
from collections.abc import Sequence

from benchmarks.fidelity_parts.page import GROUP_NAMES, SHOWN
from benchmarks.fidelity_parts.summary import Line, Report

WIDTH, HEIGHT, LEFT, TOP, PANEL_W, PANEL_H, GAP = 860, 590, 56, 54, 350, 190, 70
CURVES = (
    ("sinks + window", "#999999", ""),
    ("key norm", "#c49a3a", ""),
    ("selection: replay", "#1f6fb2", ""),
    ("selection, per layer", "#2a9d55", ""),
    ("selection, per head", "#111111", ""),
    ("hybrid", "#d1495b", ""),
    ("text by BM25, read afresh", "#7a4fa3", "2 3"),
    ("spans by index heads, equal rows", "#e07b00", "2 3"),
    ("sinks + window + fetch", "#999999", "6 3"),
    ("selection, per layer + fetch", "#2a9d55", "6 3"),
)
LOW, HIGH = -0.1, 1.25


def plot(report: Report) -> str:
    """An SVG of four panels, one per group of questions."""
    parts = [
        _text(
            LEFT,
            20,
            "Recovery (1: as with the whole cache, 0: as without the document) when one row in so many is kept",
            13,
        )
    ]
    for i, (group, title) in enumerate(GROUP_NAMES):
        x, y = LEFT + (i % 2) * (PANEL_W + GAP), TOP + (i // 2) * (PANEL_H + 56)
        parts += _panel(x, y, title)
        for method, colour, dashes in CURVES:
            parts += _curve(x, y, _points(report.lines, method, group), colour, dashes)
    parts += _legend(report.lines)
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
    for value in (0, 0.25, 0.5, 0.75, 1, 1.25):
        at = _y(y, value)
        shade = "#999" if value in (0, 1) else "#ddd"
        parts.append(f'<line x1="{x}" y1="{at:.1f}" x2="{x + PANEL_W}" y2="{at:.1f}" stroke="{shade}"/>')
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


def _legend(lines: Sequence[Line]) -> list[str]:
    there = {line.method for line in lines}
    parts = []
    for i, (method, colour, dashes) in enumerate(c for c in CURVES if c[0] in there):
        x, y = LEFT + (i % 3) * 260, HEIGHT - 62 + (i // 3) * 17
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" stroke="{colour}" stroke-width="2"{dashed}/>')
        parts.append(_text(x + 30, y + 4, SHOWN.get(method, method), 11))
    return parts


def _x(left: float, ratio: float) -> float:
    return left + PANEL_W * math.log2(ratio) / 5


def _y(top: float, value: float) -> float:
    return top + PANEL_H * (HIGH - min(max(value, LOW), HIGH)) / (HIGH - LOW)


def _text(x: float, y: float, text: str, size: int) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{text}</text>'
