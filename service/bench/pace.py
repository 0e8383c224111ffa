"""How long what is still to be measured takes, and when the time for it is over."""

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

MORE_USERS = 0.3
"""A step of one more user takes so much longer, as a first guess."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens that are prefilled one after another, and decode steps of `users` answers."""

    prefill: int = 0
    steps: int = 0
    users: int = 1


class Pace:
    """Guesses by the speeds of a warm-up, corrected by what the parts measured since have taken."""

    def __init__(self, token_s: float, step_s: float) -> None:
        self._token_s = token_s
        self._step_s = step_s
        self._guessed = self._taken = 0.0

    def ended(self, cost: Cost, seconds: float) -> None:
        self._guessed += self._guess(cost)
        self._taken += seconds

    def left_s(self, costs: Iterable[Cost]) -> float:
        """Seconds that these take."""
        correction = self._taken / self._guessed if self._guessed else 1.0
        return correction * sum(self._guess(cost) for cost in costs)

    def _guess(self, cost: Cost) -> float:
        return cost.prefill * self._token_s + cost.steps * self._step_s * (1 + MORE_USERS * (cost.users - 1))


class Deadline:
    """The moment when measuring ends, `seconds` from now."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends = clock() + seconds

    @property
    def left_s(self) -> float:
        return self._ends - self._clock()

    async def repeated(self, times: int, sample: Callable[[], Awaitable[T]]) -> list[T]:
        """So many samples, fewer when another would come too late; one at least."""
        found: list[T] = []
        longest = 0.0
        while len(found) < times and (not found or longest < self.left_s):
            began = self._clock()
            found.append(await sample())
            longest = max(longest, self._clock() - began)
        return found
