"""The capacity model: from documents, questions and speeds to shares, times and throughput, in closed forms.

A fixed point: how long an answer keeps its place follows from how many are computed at once and from how often its
document has to be brought; both follow from how long answers keep their places.
"""

from dataclasses import dataclass, field

import numpy as np

from benchmarks.capacity_parts.finding import Finding, patience
from benchmarks.capacity_parts.holders import Held
from benchmarks.capacity_parts.inputs import SOURCES, Inputs
from benchmarks.capacity_parts.queueing import Line, line, worker
from service.engine.scheduler.batching import CANARY_ROWS

ROUNDS = 60
CALLS, RESTORE_CALLS, LAST_CALLS = 1, 3, 1
"""Of an answer to the engine's thread, one after the other: each waits for the end of a step that runs."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """`rate`: answers a second, of which a worker computes `batch` at once in the mean. `place_s`: how long an answer
    keeps its place; `taken`: the share of places that is. `first_*_s`: time to first token. `full`: how often a worker
    has no place free. `lasting_s`: how long an unused document stays in memory. `brought_bps`: bytes a second out of
    each tier, of all workers together."""

    rate: float
    refused: float
    shares: dict[str, float]
    first_mean_s: float
    first_p50_s: float
    first_p95_s: float
    place_s: float
    batch: float
    taken: float
    full: float
    waits: float
    wait_s: float
    step_s: float
    copies: float
    lasting_s: float
    brought_bps: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(slots=True)
class _State:
    place_s: float
    taken: float = 0.0
    restores: float = 0.0
    """Restores of an answer, in the mean."""
    bring_s: float = 0.0
    """Of a restore, in the mean."""
    shares: dict[str, float] = field(default_factory=dict[str, float])
    found: Held | None = None


class Model:
    """`forecast` of one set of inputs at a rate of questions a second."""

    def __init__(self, inputs: Inputs) -> None:
        self._in = inputs
        self._finding = Finding(inputs)
        self._tokens = inputs.documents.tokens

    def forecast(self, rate: float) -> Forecast:
        """What `rate` questions a second come to. A rate that cannot be served gives infinite times, unless a limit
        refuses what is too much."""
        state, queue = _State(self._alone_s()), Line(0.0, 0.0)
        for n in range(ROUNDS):
            served, before = rate * (1 - queue.refused), state.place_s
            self._settle(state, served, min(served * state.place_s / self._places, 1.0), 0.5 if n < 20 else 0.2)
            queue = self._line(rate, state)
            if n > 5 and abs(state.place_s - before) < 1e-5 * before:
                break
        return self._forecast(rate, queue, state)

    def _line(self, rate: float, state: _State) -> Line:
        """Questions wait for all places when all are taken, and before that for a worker that has their document."""
        places, cv = self._in.worker.places, self._cv(state)
        together = line(self._places, rate, state.place_s, cv, self._in.fleet.queue_limit)
        if self._in.fleet.workers == 1:
            return together
        own = worker(places, patience(places), state.taken * places)
        waits_there = (1 - together.waits) * float(own.waits)
        wait_there = float(own.wait) * state.place_s * (1 + cv * cv) / 2
        waits = together.waits + waits_there
        wait_s = (together.waits * together.wait_s + waits_there * wait_there) / waits if waits else 0.0
        return Line(waits, wait_s, together.refused, together.shape if together.waits > 0.5 else 1)

    def _settle(self, state: _State, served: float, taken: float, share: float) -> None:
        """One round: where documents are found, and how long places are kept then."""
        state.found = self._finding.found(served, state.place_s, taken)
        state.shares = self._finding.shares(state.found, served)
        state.taken = taken
        state.restores = 1 - state.shares["resident"]
        state.bring_s = self._bring_s(state.shares)
        place_s = self._place_s(served / self._in.fleet.workers, taken, state)
        state.place_s += (place_s - state.place_s) * share

    def capacity(self) -> float:
        """Questions a second at which all places are always taken."""
        state = _State(self._alone_s())
        for _ in range(ROUNDS):
            rate = self._places / state.place_s
            self._settle(state, rate, 1.0, 0.5)
        return self._places / state.place_s

    @property
    def _places(self) -> int:
        return self._in.fleet.workers * self._in.worker.places

    def _alone_s(self) -> float:
        worker, traffic = self._in.worker, self._in.traffic
        return (worker.step_s + worker.row_s) * traffic.answer_tokens + worker.hold_s + self._prompt_s()

    def _prompt_s(self) -> float:
        """What a question's own pass takes beside a step."""
        worker = self._in.worker
        return (
            worker.row_s * self._in.traffic.question_tokens + worker.prompt_s + worker.prompt_context_s * self._tokens
        )

    # How long things take.

    def _bring_s(self, shares: dict[str, float]) -> float:
        missed = sum(share for source, share in shares.items() if source != "resident")
        total = sum(share * self._mean_bring_s(source) for source, share in shares.items() if source != "resident")
        return total / missed if missed else 0.0

    def _mean_bring_s(self, source: str) -> float:
        return sum(share * self._in.bring_s(source, tokens) for share, tokens in self._in.documents.lengths)

    def _thread_s(self, shares: dict[str, float]) -> float:
        """Of the engine's time, for bringing the document of an answer: computing one takes all of it."""
        worker = self._in.worker
        brought = sum(shares[near] * (self._mean_bring_s(near) - worker.restore_s) for near in ("host", "disk"))
        brought += (shares["redis"] + shares["object"]) * (self._mean_bring_s("disk") - worker.restore_s)
        return worker.thread_share * brought + shares["computed"] * self._mean_bring_s("computed")

    def _step(self, rate: float, taken: float, state: _State) -> tuple[float, float]:
        """Of a worker with `rate` answers a second: how long a step takes as an answer sees it, and the probability
        that one runs."""
        worker, traffic = self._in.worker, self._in.traffic
        n = traffic.answer_tokens
        on_thread = rate * self._thread_s(state.shares)
        building = self._in.documents.new_daily / 86_400 / self._in.fleet.workers * worker.compute_s(self._tokens)
        slowed = 1 / (1 - min(on_thread + min(building, 0.4), 0.95))
        step_s, others = worker.step_s + worker.row_s, 0.0
        for _ in range(30):
            others = min(rate * n * step_s, taken * worker.places) * (worker.places - 1) / worker.places
            rows = (1 + others) * (n + traffic.question_tokens) / n
            own = worker.step_s + worker.row_s * rows + worker.context_s * self._tokens * (1 + others)
            prompts = (1 + others) / n * (worker.prompt_s + worker.prompt_context_s * self._tokens)
            step_s = (own + prompts) * slowed
        return step_s, 1 - (1 - min(others / max(worker.places - 1, 1), 1.0)) ** max(worker.places - 1, 1)

    def _begin_s(self, rate: float, taken: float, state: _State, *, restored: bool) -> float:
        """From its place to its first token, but for bringing its document."""
        step_s, busy = self._step(rate, taken, state)
        calls = CALLS + RESTORE_CALLS * restored
        canary = restored and self._in.traffic.question_tokens + 1 > CANARY_ROWS
        return busy * (calls - 0.5 + 1) * step_s + step_s * (1 + canary) + self._prompt_s()

    def _place_s(self, rate: float, taken: float, state: _State) -> float:
        step_s, busy = self._step(rate, taken, state)
        begin = (1 - state.restores) * self._begin_s(rate, taken, state, restored=False)
        begin += state.restores * (self._begin_s(rate, taken, state, restored=True) + state.bring_s)
        return (
            begin + (self._in.traffic.answer_tokens - 1) * step_s + busy * LAST_CALLS * step_s + self._in.worker.hold_s
        )

    def _cv(self, state: _State) -> float:
        """Of how long places are kept: answers differ in length."""
        traffic = self._in.traffic
        answer_s = traffic.answer_tokens * (self._in.worker.step_s + self._in.worker.row_s)
        return min(traffic.answer_cv * answer_s / state.place_s, traffic.answer_cv)

    # The result.

    def _forecast(self, rate: float, queue: Line, state: _State) -> Forecast:
        assert state.found is not None
        shares, found = state.shares, state.found
        served = min(rate * (1 - queue.refused), self._places / state.place_s)
        per_worker, taken = served / self._in.fleet.workers, min(served * state.place_s / self._places, 1.0)
        step_s, _ = self._step(per_worker, taken, state)
        firsts = self._firsts(per_worker, taken, state, shares)
        mean = sum(share * seconds for share, seconds in firsts) + queue.waits * queue.wait_s
        return Forecast(
            rate=served,
            refused=queue.refused,
            shares=shares,
            first_mean_s=mean,
            first_p50_s=mixed_quantile(firsts, queue, 0.5),
            first_p95_s=mixed_quantile(firsts, queue, 0.95),
            place_s=state.place_s,
            batch=min(per_worker * self._in.traffic.answer_tokens * step_s, self._in.worker.places),
            taken=taken,
            full=float(worker(self._in.worker.places, 0, taken * self._in.worker.places).full),
            waits=queue.waits,
            wait_s=queue.wait_s,
            step_s=step_s,
            copies=self._finding.copies(found),
            lasting_s=found.lasting_s,
            brought_bps={
                source: served * shares[source] * self._tokens * self._in.documents.kv_nbytes for source in SOURCES[1:]
            },
        )

    def _firsts(self, rate: float, taken: float, state: _State, shares: dict[str, float]) -> list[tuple[float, float]]:
        """Shares of questions, and seconds to the first token when a place is free."""
        here = self._begin_s(rate, taken, state, restored=False) + self._in.fleet.api_s
        there = self._begin_s(rate, taken, state, restored=True) + self._in.fleet.api_s
        firsts = [(shares["resident"], here)]
        for source in SOURCES[1:]:
            for share, tokens in self._in.documents.lengths:
                firsts.append((shares[source] * share, there + self._in.bring_s(source, tokens)))
        return firsts


def mixed_quantile(firsts: list[tuple[float, float]], queue: Line, share: float) -> float:
    """Of sums of one of several values and of waiting, which is none or the line's."""
    if queue.waits >= 1 and queue.wait_s == float("inf"):
        return float("inf")
    times = np.array([seconds for part, seconds in firsts if part > 0])
    parts = np.array([part for part, _ in firsts if part > 0])
    low, high = 0.0, float(times.max()) + 40 * queue.wait_s + 1e-9
    for _ in range(60):
        at = (low + high) / 2
        later = np.where(times > at, 1.0, queue.waits * queue.longer(at - times))
        beyond = (parts * later).sum() / parts.sum()
        low, high = (at, high) if beyond > 1 - share else (low, at)
    return high
