"""What a step of more rows costs, as a multiple of one without drafts: measured while it runs."""

from collections import deque
from collections.abc import Hashable
from statistics import median

_PER_ROW = 0.05
"""Of a step of the same sequences, for each row of drafts: until it is measured."""
_BASES, _RATIOS = 9, 15
_LEAST = 4
"""Measurements before they count: the first step of a number of rows also makes the memory for it, or was held up."""
_BASE_STEPS = 100
"""Steps with drafts after which one without is measured again: answers grow, and one alone may have been held up."""


class StepCosts:
    """Medians of the last steps, by the number of sequences and of rows: other work on the machine holds up some. What
    a step takes depends on the documents of its sequences: it is compared with steps on the same ones only."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[int, int], deque[float]] = {}
        self._known: dict[int, dict[int, float]] = {}
        self._members: tuple[Hashable, ...] = ()
        self._bases: deque[float] = deque(maxlen=_BASES)
        self._n_since = 0

    def has_base(self, n_sequences: int) -> bool:
        """Whether the last step was of so many sequences, and one of theirs without drafts was measured lately: else
        what drafts cost is not found out, where some sequence has drafts at every step."""
        return len(self._members) == n_sequences and bool(self._bases) and self._n_since < _BASE_STEPS

    @property
    def base_s(self) -> float:
        """Seconds of a step of the last ones' sequences without drafts; only where `has_base`."""
        return median(self._bases)

    def record(self, members: tuple[Hashable, ...], n_rows: int, seconds: float) -> None:
        """A step took `seconds` for `n_rows` rows, a row of each sequence and drafts. `members` name the sequences'
        documents."""
        if members != self._members:
            self._members = members
            self._bases.clear()
        self._n_since = 0 if n_rows == len(members) else self._n_since + 1
        if n_rows == len(members):
            self._bases.append(seconds)
        elif self._bases:
            of_rows = self._ratios.setdefault((len(members), n_rows), deque(maxlen=_RATIOS))
            of_rows.append(seconds / median(self._bases))
            if len(of_rows) >= _LEAST:
                self._known.setdefault(len(members), {len(members): 1.0})[n_rows] = median(of_rows)

    def ratio(self, n_sequences: int, n_rows: int) -> float:
        """How long a step of `n_rows` rows takes, where one row of each sequence takes 1."""
        known = self._known.get(n_sequences, {n_sequences: 1.0})
        if n_rows in known:
            return known[n_rows]
        below = max(rows for rows in known if rows < n_rows)
        above = min((rows for rows in known if rows > n_rows), default=None)
        slope = _PER_ROW if above is None else (known[above] - known[below]) / (above - below)
        return known[below] + (n_rows - below) * max(slope, 0.0)
