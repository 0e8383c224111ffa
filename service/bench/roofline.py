"""A roofline plot as SVG: operations a second over operations per byte, below what memory and products allow."""

import math
from collections.abc import Iterator, Sequence
from html import escape

from service.bench.results import Row, Run

WIDTH, HEIGHT = 1240, 520
LEFT, RIGHT, TOP, BOTTOM = 80, 460, 40, 60
"""Margins of the plot; what the points are stands to its right."""
_COLOURS = {"prefill": "#b4540a", "decode": "#1f5fa8"}


class _Scale:
    """Powers of ten onto pixels."""

    def __init__(self, least: float, most: float, first: float, last: float) -> None:
        self.low, self.high = math.floor(math.log10(least)), math.ceil(math.log10(most))
        self.high = max(self.high, self.low + 1)
        self._first, self._last = first, last

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self._first + share * (self._last - self._first)

    @property
    def ticks(self) -> range:
        return range(self.low, self.high + 1)


def points(run: Run) -> list[tuple[Row, float, float]]:
    """Rows with operations and bytes, with operations per byte and operations a second of each."""
    known = (row for row in run.rows if row.flops and row.nbytes and row.gbps)
    return [(row, row.flops / row.nbytes, row.flops / row.nbytes * row.gbps * 1e9) for row in known]


def roofline(run: Run) -> str:
    """The plot of a run; without points when nothing is known of the hardware."""
    found = points(run)
    peak, bandwidth = max(run.tflops, 1e-6) * 1e12, max(run.bandwidth_gbps, 1e-6) * 1e9
    knee = peak / bandwidth
    xs = [knee / 100, knee * 10, *(x for _, x, _ in found)]
    ys = [bandwidth * min(xs), peak, *(y for _, _, y in found)]
    x_scale = _Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_scale = _Scale(min(ys), max(ys) * 1.2, HEIGHT - BOTTOM, TOP)
    body = [*_axes(x_scale, y_scale), *_roof(x_scale, y_scale, peak, bandwidth), *_marks(found, x_scale, y_scale)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
    )
    title = escape(f"{run.place.get('model', '')} on {run.place.get('device', '')}, {run.at[:10]}")
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, background, f'<text x="{LEFT}" y="22" font-size="14">{title}</text>', *body, "</svg>", ""])


def _axes(x: _Scale, y: _Scale) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for power in x.ticks:
        at = x.at(10.0**power)
        yield f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom}" stroke="#ddd"/>'
        yield f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{_power(power)}</text>'
    for power in y.ticks:
        at = y.at(10.0**power)
        yield f'<line x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{_power(power - 9)}</text>'
    yield f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 16}" text-anchor="middle">operations per byte moved</text>'
    middle = (TOP + bottom) / 2
    yield (
        f'<text x="20" y="{middle}" text-anchor="middle" transform="rotate(-90 20 {middle})">'
        "10^9 operations a second</text>"
    )


def _power(power: int) -> str:
    return f"{10**power:g}" if -3 <= power <= 4 else f"10^{power}"


def _roof(x: _Scale, y: _Scale, peak: float, bandwidth: float) -> Iterator[str]:
    first, last, knee = 10.0**x.low, 10.0**x.high, peak / bandwidth
    first = max(first, 10.0**y.low / bandwidth)
    corners = [
        (first, first * bandwidth),
        (min(knee, last), min(knee, last) * bandwidth),
        (last, min(peak, last * bandwidth)),
    ]
    path = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in corners)
    yield f'<polyline points="{path}" fill="none" stroke="#333" stroke-width="2"/>'
    yield (
        f'<text x="{WIDTH - RIGHT}" y="{y.at(peak) - 8:.1f}" text-anchor="end">'
        f"{bandwidth / 1e9:.0f} GB/s, {peak / 1e12:.3g} TFLOP/s</text>"
    )


def _marks(found: Sequence[tuple[Row, float, float]], x: _Scale, y: _Scale) -> Iterator[str]:
    for number, (row, a, b) in enumerate(found, 1):
        colour = _COLOURS.get(row.name.split(",")[0], "#555")
        told = escape(f"{row.name}: {row.value:.3g} {row.unit}, {row.share:.0%} of the bound")
        yield f'<circle cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="5" fill="{colour}"><title>{told}</title></circle>'
        yield f'<text x="{x.at(a) + 8:.1f}" y="{y.at(b) + 4:.1f}" fill="{colour}">{number}</text>'
        beside = f'x="{WIDTH - RIGHT + 16}" y="{TOP + 16 * number}"'
        yield f'<text {beside} fill="{colour}" font-size="11">{number} {told}</text>'
