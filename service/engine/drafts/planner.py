"""How many drafts a step takes: as many as make tokens come faster, none where they do not."""

from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

from service.engine.drafts.costs import StepCosts
from service.engine.drafts.drafter import Drafter
from service.engine.drafts.rates import Rates

if TYPE_CHECKING:
    from service.engine.drafts.leader import Leader

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
    """Of one engine. At most `most` drafts of a sequence in a step, and none beyond `most_rows` rows of all. `leader`:
    the draft model, where there is one."""

    def __init__(self, most: int, most_rows: int = MOST_ROWS) -> None:
        self.most = most
        self.rates = Rates()
        self.costs = StepCosts()
        self.leader: Leader | None = None
        self._most_rows = most_rows
        self._n_passed = 0

    def plan(self, drafters: Sequence[Drafter | None], room: Sequence[int]) -> list[list[int]]:
        """The drafts of each sequence of a step; `room`: how many it may have at most. Raises what the draft model's
        runner raises when it is lost."""
        chances = [
            [] if drafter is None else drafter.chances(min(self.most, n))
            for drafter, n in zip(drafters, room, strict=True)
        ]
        if self.leader is not None and (led := self.leader.plan(self, drafters, room, chances)) is not None:
            return led
        counts = self._counts(chances)
        return [
            drafter.draft(n) if drafter is not None and n else [] for drafter, n in zip(drafters, counts, strict=True)
        ]

    def fastest(
        self, chances: Sequence[Sequence[float]], more: float = 0.0, each: float = 0.0
    ) -> tuple[float, list[int]]:
        """The most tokens that a step can give in the time of one without drafts, and how many drafts of each sequence
        it takes. `more`: what drafts cost beside their rows, as a multiple of that time, and `each` of them."""
        return self._fastest(self._likeliest(chances), len(chances), more, each)

    def _fastest(
        self, best: Sequence[tuple[float, int]], n: int, more: float = 0.0, each: float = 0.0
    ) -> tuple[float, list[int]]:
        speeds = self._speeds(n, [-chance for chance, _ in best], more, each)
        fastest = max(range(len(speeds)), key=speeds.__getitem__, default=None)
        if fastest is None:
            return float(n), [0] * n
        return speeds[fastest], _counts_of(best[: fastest + 1], n)

    def _counts(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """How many drafts of each sequence: as many as give most tokens a second. Where others wait for drafts it is
        measured first what a step takes without."""
        best, n = self._likeliest(chances), len(chances)
        if not best or (n > 1 and not self.costs.has_base(n)):
            return [0] * n
        speed, counts = self._fastest(best, n)
        if speed >= LEAST_GAIN * n:
            return counts
        gain = (n + sum(-chance for chance, _ in best)) / n
        return _counts_of(best[: self._tried(gain, len(best))], n)

    def _likeliest(self, chances: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
        """The likeliest drafts come first, so that those of a sequence are in order; less what chance each has, and
        whose it is."""
        best = sorted(((-chance, i) for i, of_one in enumerate(chances) for chance in of_one))
        return best[: max(self._most_rows - len(chances), 0)]

    def _speeds(self, n: int, chances: Sequence[float], more: float = 0.0, each: float = 0.0) -> list[float]:
        """Tokens in the time of a step of `n` sequences without drafts, with the first of these drafts, the first two,
        ..., as far as others do not wait too long for them."""
        tokens = [n + one for one in accumulate(chances)]
        costs = [self.costs.ratio(n, n + i) + more + i * each for i in range(1, len(chances) + 1)]
        if n > 1:
            costs = list(takewhile(lambda cost: cost <= MOST_SLOWER, costs))
        return [of_step / cost for of_step, cost in zip(tokens, costs, strict=False)]

    def _tried(self, gain: float, n_drafts: int) -> int:
        """How many drafts are computed though they do not seem to pay."""
        self._n_passed += gain >= _WORTH_A_TRY
        if self._n_passed < TRIED_EVERY:
            return 0
        self._n_passed = 0
        return n_drafts


def _counts_of(drafts: Sequence[tuple[float, int]], n: int) -> list[int]:
    """How many of these are of each of `n` sequences."""
    counts = [0] * n
    for _, i in drafts:
        counts[i] += 1
    return counts
