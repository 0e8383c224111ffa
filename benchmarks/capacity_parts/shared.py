"""What all workers share, and how much of it a load uses: which part is the first that is not enough."""

import math
from dataclasses import dataclass, replace

from benchmarks.capacity_parts.inputs import Inputs
from benchmarks.capacity_parts.model import Forecast, Model

DAY_S, MONTH_S = 86_400.0, 30.4 * 86_400.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Of shared parts. `redis_token_s`, `api_token_s`: processor time for a relayed token, as `benchmarks.relay` found
    it on two cores; `redis_question_s`, `api_question_s`: for all else of a question, and `commits` of PostgreSQL, by
    `capacity --check`. `state_nbytes`: of a worker's state, and of each document in it. `redis_bps`: of snapshots
    through one Redis, by `benchmarks.tiers`. `commits_s`, what one PostgreSQL takes, is assumed.
    """

    redis_token_s: float = 9.5e-6
    redis_question_s: float = 2.5e-3
    api_token_s: float = 81e-6
    api_question_s: float = 45e-3
    commits: float = 3.3
    state_nbytes: float = 900.0
    state_document_nbytes: float = 87.0
    redis_bps: float = 600e6
    commits_s: float = 5_000.0
    busy: float = 0.7
    """How much of a processor may be used in the mean."""


@dataclass(frozen=True, slots=True)
class Use:
    """At the peak. Shares of what one has; `apis` are processes of one core each."""

    apis: int
    redis_fleet: float
    redis_tier: float
    postgres: float
    state_bps: float
    redis_nbytes: float
    disk_nbytes: float
    object_nbytes: float
    host_nbytes: float
    turn_daily_nbytes: float
    egress_month_nbytes: float

    def too_small(self) -> list[tuple[str, float]]:
        """The parts of which one is not enough, and how many it takes, the worst first."""
        parts = {
            "Redis of the tier": self.redis_tier,
            "Redis of the fleet": self.redis_fleet,
            "PostgreSQL": self.postgres,
        }
        return sorted(((name, n) for name, n in parts.items() if n > 1), key=lambda part: -part[1])


def use_of(inputs: Inputs, peak: Forecast, mean: Forecast, costs: Costs) -> Use:
    """`peak` and `mean`: at the rates of the busiest hour and of the whole day."""
    fleet, traffic, documents, worker = inputs.fleet, inputs.traffic, inputs.documents, inputs.worker
    tokens = peak.rate * traffic.answer_tokens
    apis = max(1, math.ceil((tokens * costs.api_token_s + peak.rate * costs.api_question_s) / costs.busy))
    resident = min(documents.n, (worker.memory_nbytes + worker.host_nbytes) / (documents.tokens * documents.kv_nbytes))
    state_nbytes = costs.state_nbytes + resident * costs.state_document_nbytes
    state_bps = apis * fleet.workers * state_nbytes / fleet.heartbeat_s
    relayed = tokens * costs.redis_token_s + peak.rate * costs.redis_question_s
    snapshots = documents.n * documents.tokens * documents.kv_nbytes
    turns_bps = peak.rate * inputs.turn_nbytes if inputs.tiers.redis_nbytes else 0.0
    kept_turns = traffic.mean_rate * DAY_S * traffic.kept_days * inputs.turn_nbytes
    return Use(
        apis=apis,
        redis_fleet=(relayed + state_bps / costs.redis_bps) / costs.busy,
        redis_tier=(peak.brought_bps["redis"] + peak.brought_bps["object"] + turns_bps) / costs.redis_bps,
        postgres=peak.rate * costs.commits / costs.commits_s,
        state_bps=state_bps,
        redis_nbytes=min(inputs.tiers.redis_nbytes, snapshots),
        disk_nbytes=min(snapshots + kept_turns, worker.disk_nbytes * fleet.workers),
        object_nbytes=snapshots + kept_turns if inputs.tiers.object_nbytes else 0.0,
        host_nbytes=min(worker.host_nbytes * fleet.workers, snapshots),
        turn_daily_nbytes=traffic.mean_rate * DAY_S * inputs.turn_nbytes,
        egress_month_nbytes=mean.brought_bps["object"] * MONTH_S,
    )


def workers_for(inputs: Inputs, rate: float, first_p95_s: float, taken: float = 0.75, most: int = 4096) -> int:
    """The fewest workers that serve a rate with this time to the first token and places to spare; `most` where no
    number does."""

    def enough(workers: int) -> bool:
        told = Model(replace(inputs, fleet=replace(inputs.fleet, workers=workers))).forecast(rate)
        return told.first_p95_s <= first_p95_s and told.taken <= taken

    low, high = 0, max(1, int(rate / Model(inputs).capacity()))
    while not enough(high):
        if high >= most:
            return most
        low, high = high, math.ceil(high * 1.5)
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
