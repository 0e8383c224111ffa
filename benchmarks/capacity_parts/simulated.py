"""The closed forms beside the simulator, at sizes that it can run, for many more questions than a real run has."""

from dataclasses import replace

from benchmarks.bench_report import table
from benchmarks.capacity_parts.inputs import Documents, Fleet, Inputs, Tiers, Traffic, Worker
from benchmarks.capacity_parts.measures import measured
from benchmarks.capacity_parts.model import Model
from benchmarks.capacity_parts.simulator import Simulator
from benchmarks.capacity_parts.trace import poisson

SIZES = (1_000, 3_000)
INPUTS = Inputs(
    Documents(24, ((0.5, SIZES[0]), (0.5, SIZES[1])), 104),
    Traffic(0, 0, question_tokens=24, answer_tokens=16, answer_cv=0.3),
    Worker(4, step_s=0.04, row_s=0.001, memory_nbytes=1.2e6, disk_bps=1.1e6, restore_s=0.01, prefill_s=1e-3),
    Fleet(1),
    Tiers(redis_nbytes=1e9, redis_s=0.02),
)
QUESTIONS = 4_000
CASES = ((1, 24, 0.5), (1, 24, 0.8), (3, 24, 0.4), (3, 24, 0.7), (8, 64, 0.7), (20, 200, 0.7))
"""Workers, documents, and the load as a share of what the model says can be served."""


def simulated() -> str:
    """A table."""
    return table(
        ("workers, documents, load", "resident", "mean time to first token", "p95", "places kept"),
        [_row(*case) for case in CASES],
    )


def _row(workers: int, documents: int, load: float) -> tuple[str, ...]:
    inputs = replace(
        INPUTS, fleet=replace(INPUTS.fleet, workers=workers), documents=replace(INPUTS.documents, n=documents)
    )
    model, sizes = Model(inputs), [SIZES[n % 2] for n in range(documents)]
    rate = load * model.capacity()
    told, seconds = model.forecast(rate), QUESTIONS / rate
    simulator = Simulator(inputs, sizes, [n % workers for n in range(documents)])
    trace = poisson(rate, seconds, documents, inputs.documents.zipf, (8, 24), seed=workers)
    seen = measured(simulator.run(trace), seconds, 0.05 * seconds)
    return (
        f"{workers}, {documents}, {load:.0%}",
        _beside(seen.shares["resident"], told.shares["resident"], "{:.1%}"),
        _beside(seen.first_mean_s, told.first_mean_s, "{:.3f} s"),
        _beside(seen.first_p95_s, told.first_p95_s, "{:.3f} s"),
        f"model {told.place_s:.2f} s",
    )


def _beside(seen: float, told: float, form: str) -> str:
    return f"{form.format(seen)}, model {form.format(told)} ({told / seen - 1:+.0%})"
