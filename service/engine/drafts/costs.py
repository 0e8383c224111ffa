"""What a step of more rows costs, as a multiple of one without drafts: measured while it runs."""

_PER_ROW = 0.05
"""Of a step of the same sequences, for each row of drafts: until it is measured."""
_BASE_SHARE, _RATIO_SHARE = 0.25, 0.15
_LEAST, _MOST = 0.9, 8.0


class StepCosts:
    """Running means, by the number of sequences and of rows. What a step takes depends on the documents of its
    sequences: it is compared with steps of the same ones only."""

    def __init__(self) -> None:
        self._ratios: dict[int, dict[int, float]] = {}
        self._members: tuple[int, ...] = ()
        self._base: float | None = None

    def record(self, members: tuple[int, ...], n_rows: int, seconds: float) -> None:
        """A step took `seconds` for `n_rows` rows of the sequences `members`, a row of each and drafts."""
        if members != self._members:
            self._members, self._base = members, None
        if n_rows == len(members):
            before = seconds if self._base is None else self._base
            self._base = before + _BASE_SHARE * (min(seconds, 2 * before) - before)
        elif self._base:
            self._learn(len(members), n_rows, min(max(seconds / self._base, _LEAST), _MOST))

    def ratio(self, n_sequences: int, n_rows: int) -> float:
        """How long a step of `n_rows` rows takes, where one row of each sequence takes 1."""
        known = {n_sequences: 1.0} | self._ratios.get(n_sequences, {})
        if n_rows in known:
            return known[n_rows]
        below = max(rows for rows in known if rows < n_rows)
        above = min((rows for rows in known if rows > n_rows), default=None)
        slope = _PER_ROW if above is None else (known[above] - known[below]) / (above - below)
        return known[below] + (n_rows - below) * max(slope, 0.0)

    def _learn(self, n_sequences: int, n_rows: int, ratio: float) -> None:
        ratios = self._ratios.setdefault(n_sequences, {})
        before = ratios.get(n_rows, self.ratio(n_sequences, n_rows))
        share = _RATIO_SHARE if n_rows in ratios else 0.5
        ratios[n_rows] = before + share * (ratio - before)
