"""Numbers that a command takes: refused where nothing that is computed of them would mean anything."""

import math
from typing import Any

import click


class Finite(click.FloatRange):
    """A range that neither "nan" nor "inf" is in: comparisons let the first through."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


AMOUNT = Finite(0, 1e6)
COUNT = click.IntRange(0, 1 << 31)
FEW = click.IntRange(0, 1 << 14)
"""Of layers, heads, widths of heads."""
BITS = Finite(0, 32)
MOST_TOKENS = 100_000_000
"""Of a document: far beyond any model."""
