"""How often a guess is right, by what is known of it before, as how many tokens before it agreed.

Measured at every token, whether the guess was computed as a draft or not: finding out costs no step.
"""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kinds:
    """Guesses told apart by a number: those below `bounds[0]`, below `bounds[1]`, ... `first`: the chance of each kind
    before anything was seen, one more than there are bounds."""

    bounds: tuple[float, ...]
    first: tuple[float, ...]


LENGTHS = Kinds((3, 4, 6, 9, 14, 24), (0.3, 0.45, 0.6, 0.75, 0.85, 0.9, 0.95))
"""By how many tokens before a guess agree."""
_STRENGTH = 6.0
_MOST = 256.0
"""Guesses that count: what is longer ago is forgotten by halves."""


class Rates:
    """Chances of guesses. A sequence's own begin as those of the process, `parent`, and count for both."""

    def __init__(self, parent: "Rates | None" = None, kinds: Kinds = LENGTHS) -> None:
        self._parent = parent
        self._kinds = kinds if parent is None else parent._kinds
        self._tried = [0.0] * len(self._kinds.first)
        self._right = [0.0] * len(self._kinds.first)

    def chance(self, number: float) -> float:
        """That a guess is right, of those with this number: behind `number` tokens that agree, where `LENGTHS` tell
        them apart."""
        return self._chance(bisect_right(self._kinds.bounds, number))

    def count(self, number: float, *, is_right: bool) -> None:
        """A guess with this number turned out to be right, or not."""
        self._count(bisect_right(self._kinds.bounds, number), is_right)

    def _chance(self, kind: int) -> float:
        before = self._kinds.first[kind] if self._parent is None else self._parent._chance(kind)
        return (self._right[kind] + _STRENGTH * before) / (self._tried[kind] + _STRENGTH)

    def _count(self, kind: int, is_right: bool) -> None:
        if self._tried[kind] >= _MOST:
            self._tried[kind], self._right[kind] = self._tried[kind] / 2, self._right[kind] / 2
        self._tried[kind] += 1
        self._right[kind] += is_right
        if self._parent is not None:
            self._parent._count(kind, is_right)
