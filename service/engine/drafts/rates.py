"""How often a guess is right, by how many tokens before it agreed.

Measured at every token, whether the guess was computed as a draft or not: finding out costs no step.
"""

from bisect import bisect_right

_LENGTHS = (3, 4, 6, 9, 14, 24)
_FIRST = (0.3, 0.45, 0.6, 0.75, 0.85, 0.9, 0.95)
"""Chances before anything was seen, for lengths below 3, below 4, ..."""
_STRENGTH = 6.0
_MOST = 256.0
"""Guesses that count: what is longer ago is forgotten by halves."""


class Rates:
    """Chances of guesses. A sequence's own begin as those of the process, `parent`, and count for both."""

    def __init__(self, parent: "Rates | None" = None) -> None:
        self._parent = parent
        self._tried = [0.0] * len(_FIRST)
        self._right = [0.0] * len(_FIRST)

    def chance(self, length: int) -> float:
        """That the token behind `length` tokens that agree is the guessed one."""
        return self._chance(bisect_right(_LENGTHS, length))

    def count(self, length: int, *, is_right: bool) -> None:
        """A guess behind `length` tokens that agree turned out to be right, or not."""
        self._count(bisect_right(_LENGTHS, length), is_right)

    def _chance(self, kind: int) -> float:
        before = _FIRST[kind] if self._parent is None else self._parent._chance(kind)
        return (self._right[kind] + _STRENGTH * before) / (self._tried[kind] + _STRENGTH)

    def _count(self, kind: int, is_right: bool) -> None:
        if self._tried[kind] >= _MOST:
            self._tried[kind], self._right[kind] = self._tried[kind] / 2, self._right[kind] / 2
        self._tried[kind] += 1
        self._right[kind] += is_right
        if self._parent is not None:
            self._parent._count(kind, is_right)
