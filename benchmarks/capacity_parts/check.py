"""Does the model say what a real installation does? Calibrated with one worker and one user, then compared with runs
of one, two and three workers at several loads."""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.capacity_parts.calibrate import SHORT, Calibration, Calibrator
from benchmarks.capacity_parts.compare import Compared, compared
from benchmarks.capacity_parts.inputs import Documents, Fleet, Inputs, Tiers, Traffic, Worker
from benchmarks.capacity_parts.installation import Installation, text
from benchmarks.capacity_parts.load import open_loop
from benchmarks.capacity_parts.measures import Measures, measured
from benchmarks.capacity_parts.model import Forecast, Model
from benchmarks.capacity_parts.simulator import Simulator
from benchmarks.capacity_parts.trace import Asked, poisson

PLACES = 4
"""Of a worker. Its pace is so slow that the engines are what limits, on a machine with two cores for all processes."""
STEP_S, ROW_S, LOAD_S, LAYER_S = 0.08, 0.002, 0.024, 0.03
LAYERS, TOKEN_NBYTES = 2, 104
"""Of the fake engine with K8V4."""
N_DOCUMENTS, BYTES = 24, (600, 2200)
RESIDENT_TOKENS = 13_000
ZIPF = 1.2
ANSWER = (8, 24)
LOADS = (0.4, 0.7, 1.4)
"""Of what the model says can be served. Under the last one it is refused what is too much."""
SECONDS = (32.0, 30.0, 24.0)
LONG_S = 600.0
"""Of a simulation in which chance is small."""
SETTLE_S = 3.0
"""At the begin of each run, in which nothing is counted."""
QUEUE = 6
"""Answers that may wait, for each worker."""
HEARTBEAT_S = 1.0
FAKE = {
    "fake_script": [97] * 64, "fake_step_s": STEP_S, "fake_row_s": ROW_S, "fake_load_s": LOAD_S,
    "fake_layer_s": LAYER_S, "resident_budget_nbytes": RESIDENT_TOKENS * TOKEN_NBYTES,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One load on so many workers: what was measured, what the simulator and the model say, and what it cost:
    processor time by kind of process, commits."""

    workers: int
    load: float
    n_asked: int
    n_tokens: int
    found: list[Compared]
    spent: dict[str, float]

    @property
    def met(self) -> bool:
        return all(one.met for one in self.found)


def inputs_of(calibration: Calibration, sizes: list[int], workers: int) -> Inputs:
    """What the model is told of an installation."""
    shares = tuple((1 / len(sizes), size) for size in sizes)
    mean, spread = sum(ANSWER) / 2, (ANSWER[1] - ANSWER[0]) / 12**0.5
    return Inputs(
        documents=Documents(len(sizes), shares, TOKEN_NBYTES, ZIPF),
        traffic=Traffic(0, 0, question_tokens=calibration.question_tokens, answer_tokens=mean, answer_cv=spread / mean),
        worker=Worker(
            places=PLACES,
            step_s=calibration.step_s,
            row_s=calibration.row_s,
            memory_nbytes=RESIDENT_TOKENS * TOKEN_NBYTES,
            disk_bps=TOKEN_NBYTES / calibration.load_s,
            restore_s=calibration.restore_s,
            hold_s=calibration.hold_s,
            prefill_s=calibration.prefill_s,
        ),
        fleet=Fleet(workers, calibration.api_s, HEARTBEAT_S, workers * (PLACES + QUEUE)),
        tiers=Tiers(
            redis_nbytes=1e12,
            redis_bps=1e12,
            redis_s=calibration.redis_s,
            object_bps=1e12,
            object_s=calibration.object_s,
        ),
    )


def check(most_workers: int = 3, seed: int = 1) -> Iterator[Calibration | Run]:
    """First the calibration, then each run as it ends. Takes about six minutes."""
    settings = {
        "fleet_heartbeat_s": HEARTBEAT_S, "lease_s": 10, "log_level": "warning", "max_batch": PLACES,
        "queue_limit": PLACES + QUEUE,
    }  # fmt: skip
    sizes = {"n_apis": 1, "n_workers": most_workers}
    with tempfile.TemporaryDirectory(prefix="preread-capacity-") as name:
        with Installation(Path(name), **sizes, fake=FAKE, **settings) as there:
            calibration = Calibrator(there, RESIDENT_TOKENS // 1000).run()
            yield calibration
            for workers in range(1, most_workers + 1):
                if workers > 1:
                    there.add_worker(queue_limit=workers * (PLACES + QUEUE))
                yield from _runs(there, calibration, workers, seed + 10 * workers)


def _runs(there: Installation, calibration: Calibration, workers: int, seed: int) -> Iterator[Run]:
    bodies = there.read([text(BYTES[n % 2], 1000 * workers + n) for n in range(N_DOCUMENTS)])
    ids, sizes = [body["id"] for body in bodies], [body["token_count"] for body in bodies]
    inputs = inputs_of(calibration, sizes, workers)
    homes, model = there.homes(ids), Model(inputs)

    def simulator_of() -> Simulator:
        return Simulator(inputs, sizes, homes)

    simulator = simulator_of()
    if workers == 3:
        there.empty_redis()
        if simulator.shared is not None:
            simulator.shared.clear()
    capacity = model.capacity()
    for number, (load, seconds) in enumerate(zip(LOADS, SECONDS, strict=True)):
        trace = _trace(load * capacity, seconds, seed + number)
        time.sleep(2 * HEARTBEAT_S)
        before = there.spent()
        real = asyncio.run(open_loop(there.api.url, trace, ids, SHORT))
        spent = {kind: value - before[kind] for kind, value in there.spent().items()}
        simulated = measured(simulator.run(trace), seconds, SETTLE_S)
        long_run = measured(simulator_of().run(_trace(load * capacity, LONG_S, seed + number)), LONG_S, 0.05 * LONG_S)
        of_all = measured(real, seconds, SETTLE_S), simulated, long_run, _of(model.forecast(load * capacity))
        found = list(compared(*of_all))
        n_tokens = sum(asked.answer_tokens for asked, one in zip(trace, real, strict=True) if one.source)
        yield Run(workers, load, len(trace), n_tokens, found, spent)
    there.delete(ids)


def _trace(rate: float, seconds: float, seed: int) -> list[Asked]:
    return list(poisson(rate, seconds, N_DOCUMENTS, ZIPF, ANSWER, seed))


def _of(forecast: Forecast) -> Measures:
    shares = {source: share for source, share in forecast.shares.items() if share}
    firsts = forecast.first_p50_s, forecast.first_p95_s
    return Measures(forecast.rate, *firsts, shares, forecast.refused, forecast.first_mean_s)
