"""How far documents are, while they are being made: kept in memory, stored now and then."""

import asyncio
from dataclasses import dataclass

from service.core import statuses
from service.core.clock import Clock


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` units (`pages`, `tokens`) of a stage; `eta_s` is None until a rate is known."""

    stage: str
    done: int = 0
    total: int = 0
    unit: str = "pages"
    eta_s: float | None = None


class ProgressBoard:
    """The newest progress of each document, and a way to wait for the next. Used from the event loop only."""

    def __init__(self) -> None:
        self._latest: dict[str, Progress] = {}
        self._changed: dict[str, asyncio.Event] = {}

    def latest(self, document_id: str) -> Progress | None:
        return self._latest.get(document_id)

    def publish(self, document_id: str, progress: Progress) -> None:
        self._latest[document_id] = progress
        self.wake(document_id)

    def finish(self, document_id: str) -> None:
        """The row says the rest."""
        self._latest.pop(document_id, None)
        self.wake(document_id)

    def wake(self, document_id: str) -> None:
        """Something else about the document changed."""
        if event := self._changed.pop(document_id, None):
            event.set()

    def waited_for(self) -> list[str]:
        """Documents whose next change somebody has asked for."""
        return list(self._changed)

    def next_change(self, document_id: str) -> asyncio.Event:
        """Set at the first change after this call: ask for it before looking at the state."""
        return self._changed.setdefault(document_id, asyncio.Event())


class Meter:
    """Progress of one stage with the time left, from the rate since the stage was (re)taken up."""

    def __init__(self, clock: Clock, stage: str, unit: str) -> None:
        self._clock = clock
        self.stage = stage
        self._unit = unit
        self._first: tuple[float, int] | None = None

    def at(self, done: int, total: int) -> Progress:
        now = self._clock.monotonic()
        if self._first is None:
            self._first = (now, done)
        since, base = self._first
        eta_s = None
        if done > base and now > since:
            eta_s = round((total - done) * (now - since) / (done - base), 1)
        return Progress(self.stage, done, total, self._unit, eta_s)


class BuildStages:
    """Progress of a build through its stages, which never goes back to an earlier one.

    A build that `is_compacted` writes all tokens to the disk before: that is not the end, and counts as prefilling.
    """

    def __init__(self, clock: Clock, *, is_compacted: bool) -> None:
        compacting = (statuses.COMPACTING,) if is_compacted else ()
        self._stages = (statuses.PREFILLING, *compacting, statuses.PERSISTING)
        self._meters = {stage: Meter(clock, stage, "tokens") for stage in self._stages}
        self._furthest = 0

    def at(self, stage: str, done: int, total: int) -> Progress | None:
        """None for what is not told."""
        if stage not in self._meters or self._stages.index(stage) not in (self._furthest, self._furthest + 1):
            return None
        self._furthest = self._stages.index(stage)
        return self._meters[stage].at(done, total)
