"""Numbers that a command takes: refused where nothing that is computed of them would mean anything."""

import math
from typing import Any

import click


class Finite(click.FloatRange):
    """A range that neither "nan" nor "inf" is in: comparisons let the first through. `least`: of what is not 0."""

    name = "number"

    def __init__(self, low: float, high: float | None = None, *, least: float = 0.0, min_open: bool = False) -> None:
        super().__init__(low, high, min_open)
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        if 0 < number < self.least:
            self.fail(f"{value} is less than {self.least:g}.", param, ctx)
        return number


AMOUNT = Finite(0, 1e6, least=1e-4)
COUNT = click.IntRange(0, 1 << 24)
"""Of tokens of a vocabulary or a window, widths of states."""
FEW = click.IntRange(0, 1 << 14)
"""Of layers, heads, widths of heads."""
BITS = Finite(0, 32, least=0.5)
AT_ONCE = click.IntRange(1, 10_000)
"""Users, documents."""
MOST_TOKENS = 100_000_000
"""Of a document: far beyond any model."""
TOKENS = click.IntRange(1, MOST_TOKENS)
