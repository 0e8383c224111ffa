"""How many drafts a step takes: as many as make tokens come faster, none where they do not."""

from collections.abc import Sequence
from itertools import accumulate, takewhile

from service.engine.drafts.costs import StepCosts
from service.engine.drafts.drafter import Drafter
from service.engine.drafts.rates import Rates

LEAST_GAIN = 1.03
"""Tokens a second with drafts, as a multiple of those without, from which on drafts are taken."""
MOST_ROWS = 24
"""Of a step, where a runner names no number."""
MOST_SLOWER = 1.5
"""A step of several sequences takes no longer than this multiple: those without drafts wait for the others'."""
TRIED_EVERY = 100
"""Steps with good guesses that were not taken: then they are, for once, so that an old measurement does not keep them
from being taken for ever."""
_WORTH_A_TRY = 1.3


class DraftPlanner:
    """Of one engine. At most `most` drafts of a sequence in a step, and none beyond `most_rows` rows of all."""

    def __init__(self, most: int, most_rows: int = MOST_ROWS) -> None:
        self.most = most
        self.rates = Rates()
        self.costs = StepCosts()
        self._most_rows = most_rows
        self._n_passed = 0

    def plan(self, drafters: Sequence[Drafter | None], room: Sequence[int]) -> list[list[int]]:
        """The drafts of each sequence of a step; `room`: how many it may have at most."""
        chances = [
            [] if drafter is None else drafter.chances(min(self.most, n))
            for drafter, n in zip(drafters, room, strict=True)
        ]
        counts = self._counts(chances)
        return [
            drafter.draft(n) if drafter is not None and n else [] for drafter, n in zip(drafters, counts, strict=True)
        ]

    def _counts(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """How many drafts of each sequence. The likeliest come first: those of a sequence are in order then."""
        best = sorted(((-chance, i) for i, of_one in enumerate(chances) for chance in of_one))
        best = best[: max(self._most_rows - len(chances), 0)]
        counts = [0] * len(chances)
        for _, i in best[: self._n_best(len(chances), [-chance for chance, _ in best])]:
            counts[i] += 1
        return counts

    def _n_best(self, n: int, chances: Sequence[float]) -> int:
        """Of how many of these drafts a step of `n` sequences gives most tokens a second. Where others wait for drafts
        it is measured first what a step takes without."""
        if not chances or (n > 1 and not self.costs.has_base(n)):
            return 0
        tokens = [n + more for more in accumulate(chances)]
        costs = [self.costs.ratio(n, n + i) for i in range(1, len(chances) + 1)]
        if n > 1:
            costs = list(takewhile(lambda cost: cost <= MOST_SLOWER, costs))
        speeds = [of_step / cost for of_step, cost in zip(tokens, costs, strict=False)]
        fastest = max(range(len(speeds)), key=speeds.__getitem__, default=0)
        if speeds and speeds[fastest] >= LEAST_GAIN * n:
            return fastest + 1
        return self._tried(tokens[-1] / n, len(chances))

    def _tried(self, gain: float, n_drafts: int) -> int:
        """How many drafts are computed though they do not seem to pay."""
        self._n_passed += gain >= _WORTH_A_TRY
        if self._n_passed < TRIED_EVERY:
            return 0
        self._n_passed = 0
        return n_drafts
