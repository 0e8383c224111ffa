"""Time as the use cases see it, so that tests can move it."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """UTC seconds since the epoch: what is stored and shown."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back: what durations are measured with."""
        ...


class SystemClock:
    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class FakeClock:
    """Stands still until `advance` moves it."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
