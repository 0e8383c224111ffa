"""Simulated time, and one engine's thread in it: calls between steps, and steps for all answers, as
`service.engine.scheduler.loop` does them."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.capacity_parts.inputs import Worker
from service.engine.scheduler.batching import CANARY_ROWS
from service.engine.scheduler.loop import CALL_SLICE_S

PROMPT_ROWS = 256
"""Rows of questions in one step."""
Then = Callable[[], object]


class Clock:
    """Events in order of their time; those of one moment in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._numbers = itertools.count()

    def at(self, when: float, then: Then) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), then))

    def after(self, seconds: float, then: Then) -> None:
        self.at(self.now + seconds, then)

    def run(self, until: float = float("inf")) -> None:
        """Until there is no event, or none before a time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, then = heapq.heappop(self._events)
            then()


@dataclass(slots=True, eq=False)
class Sequence:
    """An answer in the batch: rows of its question and tokens of its answer that are left. `canary`: the first row of
    a long question is computed alone."""

    document: int
    document_tokens: int
    rows: int
    tokens: int
    canary: bool
    on_first: Then
    on_done: Then
    rows_now: int = 0


class Engine:
    """Who waits for a call, or for the last token, goes on once the engine has begun what is next: a step that has
    begun is not waited for by the engine, but by them."""

    def __init__(self, clock: Clock, worker: Worker) -> None:
        self._clock = clock
        self._worker = worker
        self._calls: deque[tuple[float, Then]] = deque()
        self._arriving: list[Sequence] = []
        self._running: list[Sequence] = []
        self._busy = False
        self._slice_ends = 0.0
        self.n_steps = 0
        self.busy_s = 0.0

    def call(self, seconds: float, then: Then) -> None:
        """Do something between two steps that takes so long."""
        self._calls.append((seconds, then))
        self._wake()

    def submit(self, sequence: Sequence) -> None:
        self._arriving.append(sequence)
        self._wake()

    def _wake(self) -> None:
        if not self._busy:
            self._busy = True
            self._clock.after(0, self._turn)

    def _turn(self) -> None:
        self._slice_ends = self._clock.now + CALL_SLICE_S
        self._next()

    def _next(self) -> None:
        if self._calls and not (self._running and self._clock.now >= self._slice_ends):
            seconds, then = self._calls.popleft()
            self.busy_s += seconds
            self._clock.after(seconds, lambda: self._called(then))
        else:
            self._step()

    def _called(self, then: Then) -> None:
        self._next()
        then()

    def _step(self) -> None:
        self._running += self._arriving
        self._arriving.clear()
        if self._running:
            seconds = self._step_s()
            self.busy_s += seconds
            self.n_steps += 1
            self._clock.after(seconds, self._stepped)
        elif self._calls:
            self._turn()
        else:
            self._busy = False

    def _step_s(self) -> float:
        worker, budget, seconds, contexts = self._worker, PROMPT_ROWS, self._worker.step_s, dict[int, int]()
        for one in self._running:
            if one.rows:
                one.rows_now = 1 if one.canary and one.rows > CANARY_ROWS else min(one.rows, budget)
                one.canary = False
                budget -= one.rows_now
                if one.rows_now == one.rows:
                    seconds += worker.prompt_s + worker.prompt_context_s * one.document_tokens
            else:
                one.rows_now = 1
            seconds += worker.row_s * one.rows_now
            contexts[one.document] = one.document_tokens
        return seconds + worker.context_s * sum(contexts.values())

    def _stepped(self) -> None:
        told: list[Then] = []
        for one in list(self._running):
            was_question = one.rows > 0
            one.rows = max(one.rows - one.rows_now, 0)
            if one.rows or not one.rows_now:
                continue
            one.tokens -= 1
            if was_question:
                told.append(one.on_first)
            if one.tokens <= 0:
                self._running.remove(one)
                told.append(one.on_done)
        self._turn()
        for then in told:
            then()
