"""The fault matrix: what happens in each case, and what users may be told then."""

from dataclasses import dataclass
from functools import partial

from tests.chaos import faults
from tests.chaos.faults import Fault


@dataclass(frozen=True, slots=True)
class Case:
    """`what` happens, for the table. `full`: "storage_full" is a reason that users may be told. `again`: the only copy
    that can be reached may be lost, so that a document has to be computed once more. `destroys`: copies are lost that
    later faults may make the last ones of, so that nobody asks about older documents afterwards."""

    fault: Fault
    what: str
    full: bool = False
    again: bool = False
    destroys: bool = False


FAULTS: dict[str, Case] = {
    "kill_worker": Case(faults.kill_worker, "`kill -9` of a worker, started again", again=True),
    "kill_engine": Case(faults.kill_engine, "`kill -9` of a worker's engine"),
    "hang_engine": Case(faults.hang_engine, "a worker's engine stands still, its worker does not"),
    "lose_worker_disk": Case(faults.lose_worker_disk, "`kill -9` of a worker, and its disk is empty", again=True),
    "freeze_worker": Case(faults.freeze_worker, "a worker stands still past its heartbeat, and comes back", again=True),
    "stop_worker": Case(faults.stop_worker, "SIGTERM to a worker, started again", again=True),
    "kill_api": Case(faults.kill_api, "`kill -9` of an API process, started again"),
    "freeze_api": Case(faults.freeze_api, "an API process stands still past its lease: two claim its jobs"),
    "two_workers": Case(
        faults.two_workers_one_document, "the same, and nobody knows which worker has the document", again=True
    ),
    "kill_redis": Case(faults.kill_redis, "`kill -9` of Redis, which comes back empty"),
    "flush_redis": Case(faults.flush_redis, "`FLUSHALL`"),
    "fill_redis": Case(faults.fill_redis, "Redis at its `maxmemory`"),
    "stall_redis": Case(partial(faults.stall, "redis"), "Redis stands still"),
    "refuse_redis": Case(partial(faults.cut, "redis", "refuse"), "connections to Redis are refused"),
    "reset_redis": Case(partial(faults.cut, "redis", "reset"), "connections to Redis are reset within replies"),
    "fail_over_redis": Case(
        faults.fail_over_redis, "another Redis takes over, with what the first had a moment before", again=True
    ),
    "redis_cannot_save": Case(faults.redis_cannot_save, "the disk of Redis takes nothing: it refuses what is written"),
    "kill_postgres": Case(faults.kill_postgres, "`kill -9` of PostgreSQL, started again"),
    "stall_postgres": Case(partial(faults.stall, "postgres"), "PostgreSQL stands still"),
    "refuse_postgres": Case(partial(faults.cut, "postgres", "refuse"), "connections to PostgreSQL are refused"),
    "reset_postgres": Case(
        partial(faults.cut, "postgres", "reset"), "connections to PostgreSQL are reset within replies"
    ),
    "fill_postgres_disk": Case(faults.fill_postgres_disk, "the disk of PostgreSQL is full", full=True),
    "kill_object_store": Case(
        faults.kill_object_store, "`kill -9` of the object store, which comes back empty", destroys=True
    ),
    "stall_object_store": Case(partial(faults.stall, "object"), "the object store stands still"),
    "refuse_object_store": Case(partial(faults.cut, "object", "refuse"), "connections to the object store are refused"),
    "reset_object_store": Case(partial(faults.cut, "object", "reset"), "connections to it are reset within replies"),
    "object_store_500": Case(
        partial(faults.object_store_fails, ("500",)),
        "it answers 500 while a worker with no disk restores",
        again=True,
    ),
    "object_store_503": Case(partial(faults.object_store_fails, ("503",)), "the same with 503", again=True),
    "object_store_cut": Case(
        partial(faults.object_store_fails, ("cut",)), "the same with bodies that end half way", again=True
    ),
    "object_store_wrong": Case(
        partial(faults.object_store_fails, ("wrong",)), "the same with a wrong byte in each shard", again=True
    ),
    "stale_listings": Case(faults.stale_listings, "its listings are old ones"),
    "fill_object_store": Case(faults.fill_object_store, "it is full: 507 for what is written"),
    "fill_worker_disk": Case(faults.fill_worker_disk, "the disk of a worker is full", full=True, again=True),
    "fill_api_disk": Case(faults.fill_api_disk, "the disk of the API processes is full", full=True),
    "api_clock_ahead": Case(
        partial(faults.clock_jumps, "api", 50), "the clock of an API process jumps 50 hours ahead, and back"
    ),
    "api_clock_behind": Case(partial(faults.clock_jumps, "api", -50), "50 hours back, and ahead again"),
    "worker_clock_ahead": Case(
        partial(faults.clock_jumps, "worker", 50), "the clock of a worker jumps 50 hours ahead, and back"
    ),
    "worker_clock_behind": Case(partial(faults.clock_jumps, "worker", -50), "50 hours back, and ahead again"),
    "clocks_apart": Case(faults.clocks_apart, "each process has a clock up to five minutes ahead or behind"),
}

WORST = ("kill_worker", "lose_worker_disk", "freeze_worker", "kill_redis", "object_store_wrong")
"""Those for which the most has to be put right again: also run with a model."""
