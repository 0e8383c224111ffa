"""From one machine to a thousand workers: what the model says of each size, and what breaks first there."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.capacity_parts.inputs import SOURCES, Documents, Fleet, Inputs, Tiers, Traffic
from benchmarks.capacity_parts.model import Forecast, Model
from benchmarks.capacity_parts.profiles import CARD_16, CPU, GB, H200, TB, Machine
from benchmarks.capacity_parts.shared import Costs, Use, use_of, workers_for

LENGTHS = ((0.6, 4_000), (0.3, 16_000), (0.1, 64_000))
"""Tokens: contracts, reports, books."""
SHORT = ((0.7, 2_000), (0.3, 6_000))
DAILY = 20.0
FIRST_P95_S = 10.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """`workers` 0: as many as are needed. `redis_nbytes`: of the tier, 0 for none; `has_object`: whether there is an
    object store."""

    machine: Machine
    documents: int
    users: int
    lengths: tuple[tuple[float, int], ...] = LENGTHS
    redis_nbytes: float = 0.0
    has_object: bool = True

    def inputs(self, workers: int = 1) -> Inputs:
        tiers = Tiers(self.redis_nbytes, object_nbytes=float("inf") if self.has_object else 0.0)
        documents = Documents(self.documents, self.lengths, self.machine.kv_nbytes, new_daily=self.documents / 365)
        traffic = Traffic(self.users, DAILY)
        return Inputs(documents, traffic, self.machine.worker, Fleet(workers), tiers)


SCENARIOS = (
    Scenario(CPU, 100, 5, SHORT, has_object=False),
    Scenario(CARD_16, 200, 100, has_object=False),
    Scenario(CARD_16, 2_000, 800, has_object=False),
    Scenario(H200, 1_000, 400, has_object=False),
    Scenario(H200, 10_000, 1_500, redis_nbytes=100 * GB),
    Scenario(H200, 100_000, 15_000, redis_nbytes=1 * TB),
    Scenario(H200, 1_000_000, 150_000, redis_nbytes=4 * TB),
    Scenario(H200, 10_000_000, 1_500_000, redis_nbytes=16 * TB),
)


@dataclass(frozen=True, slots=True)
class Sized:
    """A scenario with the workers it needs. `peak`: in the busiest hour."""

    scenario: Scenario
    inputs: Inputs
    peak: Forecast
    mean: Forecast
    use: Use


def sized(scenario: Scenario, costs: Costs) -> Sized:
    """The fewest workers with the first token in time, at the peak, for 19 of 20 questions."""
    inputs = scenario.inputs()
    workers = workers_for(inputs, inputs.traffic.peak_rate, FIRST_P95_S)
    inputs = replace(inputs, fleet=replace(inputs.fleet, workers=workers))
    model = Model(inputs)
    peak, mean = model.forecast(inputs.traffic.peak_rate), model.forecast(inputs.traffic.mean_rate)
    return Sized(scenario, inputs, peak, mean, use_of(inputs, peak, mean, costs))


def size_rows(of: list[Sized]) -> Iterator[tuple[object, ...]]:
    """What is needed."""
    for one in of:
        use = one.use
        yield (
            one.scenario.machine.name,
            f"{one.scenario.documents:,}",
            f"{one.scenario.users:,}",
            f"{one.inputs.traffic.peak_rate:.3g}",
            f"**{one.inputs.fleet.workers:,}**",
            nbytes(one.inputs.worker.memory_nbytes * one.inputs.fleet.workers),
            nbytes(use.host_nbytes),
            nbytes(use.disk_nbytes),
            nbytes(use.redis_nbytes),
            nbytes(use.object_nbytes),
            nbytes(use.egress_month_nbytes),
            use.apis,
        )


SIZE_HEADER = (
    "machine", "documents", "users", "questions/s at the peak", "workers", "memory for documents", "host RAM", "disk",
    "Redis", "object store", "egress a month", "API processes",
)  # fmt: skip


def time_rows(of: list[Sized]) -> Iterator[tuple[object, ...]]:
    """What users see, in the busiest hour."""
    for one in of:
        shares = one.peak.shares
        yield (
            f"{one.inputs.fleet.workers:,} with {one.scenario.documents:,}",
            seconds(one.peak.first_mean_s),
            seconds(one.peak.first_p50_s),
            seconds(one.peak.first_p95_s),
            f"{one.peak.taken:.0%}",
            f"{one.peak.batch:.1f}",
            *(f"{shares[source]:.1%}" for source in SOURCES),
        )


TIME_HEADER = (
    "workers, documents", "first token, mean", "half of them", "19 of 20", "places taken", "batch",
    *(source for source in SOURCES),
)  # fmt: skip


def break_rows(of: list[Sized]) -> Iterator[tuple[object, ...]]:
    """How much of one of each shared part is used."""
    for one in of:
        use = one.use
        small = ", ".join(f"{name} ({n:,.0f} needed)" for name, n in use.too_small())
        yield (
            f"{one.inputs.fleet.workers:,} with {one.scenario.documents:,}",
            f"{use.redis_fleet:.1%}",
            f"{use.redis_tier:,.0%}" if one.inputs.tiers.redis_nbytes else "-",
            f"{use.postgres:.1%}",
            f"{nbytes(use.state_bps)}/s",
            nbytes(use.turn_daily_nbytes),
            small or "a worker",
        )


BREAK_HEADER = (
    "workers, documents", "Redis of the fleet", "Redis of the tier", "PostgreSQL", "states of workers",
    "KV of turns a day", "breaks first",
)  # fmt: skip


def nbytes(value: float) -> str:
    """For people, in powers of 1,000."""
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e3:.3g} kB" if value else "-"


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.0f} ms"
