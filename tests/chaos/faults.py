"""What happens to a world. Each fault takes it and a source of chance, and leaves it whole again, if not at once."""

import resource
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from random import Random

import psutil

from service.engine.fleet import keys
from tests.cache_store.tiers.servers import RedisServer
from tests.chaos.world import HEARTBEAT_S, LEASE_S, World
from tests.e2e.fleet import WorkerProcess
from tests.e2e.server import START_S, until

Fault = Callable[[World, Random], None]
HOUR_S = 3600.0
MOST_APART_S = 300.0


def kill_worker(world: World, random: Random) -> None:
    worker = random.choice(world.workers)
    worker.kill()
    _wait(random)
    worker.start()


def kill_engine(world: World, random: Random) -> None:
    random.choice(world.workers).kill_engine()


def lose_worker_disk(world: World, random: Random) -> None:
    worker = random.choice(world.workers)
    worker.kill()
    shutil.rmtree(worker.data_dir / "store", ignore_errors=True)
    worker.start()


def freeze_worker(world: World, random: Random) -> None:
    """Past its heartbeat: others take it for lost, and then it comes back."""
    worker = random.choice(world.workers)
    worker.freeze()
    time.sleep(HEARTBEAT_S * random.uniform(4, 8))
    worker.thaw()


def hang_engine(world: World, random: Random) -> None:
    """The engine of a worker stands still, and its worker does not: it kills it, and starts another one."""
    hung = _serving(random.choice(world.workers))
    hung.suspend()
    hung.wait(START_S)


def stop_worker(world: World, random: Random) -> None:
    worker = random.choice(world.workers)
    assert worker.stop() == 0
    worker.start()


def kill_api(world: World, random: Random) -> None:
    api = random.choice(world.apis)
    api.kill()
    _wait(random)
    api.start()


def freeze_api(world: World, random: Random) -> None:
    """Past its lease: when it comes back, it and another one claim the same jobs."""
    api = random.choice(world.apis)
    api.freeze()
    time.sleep(LEASE_S * random.uniform(1.5, 2.5))
    api.thaw()


def two_workers_one_document(world: World, random: Random) -> None:
    """The process that takes over is not told which worker has the document: it goes to another one too."""
    api = random.choice(world.apis)
    api.freeze()
    client = world.redis.client()
    until = time.monotonic() + LEASE_S * 2
    while time.monotonic() < until:
        for name in client.scan_iter(keys.PREFIX + b"home:*"):
            client.delete(name)
        time.sleep(0.05)
    client.close()
    api.thaw()


def kill_redis(world: World, random: Random) -> None:
    world.redis.kill()
    _wait(random)
    world.redis.start()


def flush_redis(world: World, random: Random) -> None:
    client = world.redis.client()
    client.flushall()
    client.close()


def fill_redis(world: World, random: Random) -> None:
    client = world.redis.client()
    client.config_set("maxmemory", 1)
    time.sleep(random.uniform(0.5, 2))
    client.config_set("maxmemory", 0)
    client.close()


def kill_postgres(world: World, random: Random) -> None:
    world.postgres.kill()
    _wait(random)
    world.postgres.start()


def kill_object_store(world: World, random: Random) -> None:
    """With all that it held."""
    world.s3.kill()
    _wait(random)
    world.s3.start()


def fail_over_redis(world: World, random: Random) -> None:
    """Another server takes over, with what the first one had a moment before. That becomes its replica: who stays
    connected to it can read, and not write."""
    before, after = world.redis.client(), RedisServer(world.directory)
    client = after.client()
    before.config_set("repl-diskless-sync-delay", 0)
    client.execute_command("REPLICAOF", "127.0.0.1", world.redis.port)
    until(lambda: client.info("replication")["master_link_status"] == "up", "no copy of Redis", 60)
    client.execute_command("REPLICAOF", "NO", "ONE")
    time.sleep(random.uniform(0, 1))
    world.wires["redis"].turn_to(after.port)
    if random.random() < 0.5:
        before.execute_command("REPLICAOF", "127.0.0.1", after.port)
        _wait(random)
        time.sleep(1)
    world.redis.kill()
    world.redis = after


def redis_cannot_save(world: World, random: Random) -> None:
    """Its disk takes nothing, so that it refuses what is written (MISCONF)."""
    client, process = world.redis.client(), psutil.Process(world.redis.process.pid)
    process.rlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    client.config_set("save", "1 1")
    until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "Redis saves", 60)
    time.sleep(random.uniform(0.5, 2))
    process.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    client.config_set("save", "")
    client.close()


def stall(server: str, world: World, random: Random) -> None:
    """A server takes connections and bytes and says nothing."""
    part = {"redis": world.redis, "postgres": world.postgres, "object": world.s3}[server]
    part.freeze()
    time.sleep(world.stall_s)
    part.thaw()


def cut(server: str, fault: str, world: World, random: Random) -> None:
    """Connections to a server are refused, or reset in the middle of replies."""
    world.wires[server].set(fault)
    time.sleep(random.uniform(0.3, 2))
    world.wires[server].set("")


def object_store_fails(kinds: tuple[str, ...], world: World, random: Random) -> None:
    """One way after the other: all that is read there or written, while a worker has to restore from there."""
    worker = random.choice(world.workers)
    worker.kill()
    shutil.rmtree(worker.data_dir / "store", ignore_errors=True)
    flush_redis(world, random)
    for n, kind in enumerate(kinds):
        world.proxy.everything = kind != "wrong"
        world.proxy.fault = kind
        if n == 0:
            worker.start()
        _wait(random)
    world.proxy.fault = ""


def fill_object_store(world: World, random: Random) -> None:
    world.proxy.methods, world.proxy.fault = frozenset({"PUT", "POST"}), "507"
    time.sleep(random.uniform(0.5, 2))
    world.proxy.fault, world.proxy.methods = "", frozenset()


def stale_listings(world: World, random: Random) -> None:
    world.proxy.fault = "stale"
    time.sleep(random.uniform(0.5, 2))
    world.proxy.fault = ""


def fill_worker_disk(world: World, random: Random) -> None:
    _fill(world, random.choice(world.workers), random)


def fill_api_disk(world: World, random: Random) -> None:
    _fill(world, random.choice(world.apis), random)


def fill_postgres_disk(world: World, random: Random) -> None:
    """It may end for that, as it does where its log has no room; whoever looks after it starts it again."""
    world.postgres_disk.fill(world.postgres, leave_nbytes=random.choice((0, 65536, 1 << 20)))
    time.sleep(random.uniform(1, 3))
    world.postgres_disk.free(world.postgres)
    if world.postgres.process.poll() is not None:
        world.postgres.start()


def _fill(world: World, one, random: Random) -> None:
    disk = world.disks[one]
    disk.fill(one, leave_nbytes=random.choice((0, 4096, 65536)))
    time.sleep(random.uniform(0.5, 2))
    disk.free(one)


def clock_jumps(kind: str, hours: float, world: World, random: Random) -> None:
    """The world's clock of one process is another from one moment to the next; later it is right again."""
    one = random.choice(world.apis if kind == "api" else world.workers)
    world.clocks[one].set(hours * HOUR_S)
    time.sleep(random.uniform(0.5, 2))
    world.clocks[one].set(0)


def clocks_apart(world: World, random: Random) -> None:
    """Each process has a clock of its own, up to five minutes ahead or behind."""
    for one in world.clocks.values():
        one.set(random.uniform(-MOST_APART_S, MOST_APART_S))
    time.sleep(random.uniform(2, 5))
    for one in world.clocks.values():
        one.set(0)


def _serving(worker: WorkerProcess) -> psutil.Process:
    """A worker's engine, once it serves: one that hangs while it starts has minutes to do so."""

    def engine() -> psutil.Process | None:
        with suppress(AssertionError, psutil.Error):
            found = worker.engine()
            ready = [line for line in worker.log().splitlines() if '"engine ready"' in line]
            return found if ready and f'"pid": {found.pid},' in ready[-1] else None
        return None

    return until(engine, "the worker has no engine", START_S, every_s=0.1)


def _wait(random: Random) -> None:
    time.sleep(random.uniform(0, 1.5))
