"""What happens to a world. Each fault takes it and some seconds, and leaves it whole again, if not at once."""

import shutil
import time
from collections.abc import Callable
from random import Random

from tests.chaos.world import HEARTBEAT_S, World
from tests.e2e.server import START_S

Fault = Callable[[World, Random], None]
STALL_S = 3.0
"""Of a server that does not answer, scaled: the time-outs of the fleet are 0.4 s apart here."""


def kill_worker(world: World, random: Random) -> None:
    worker = random.choice(world.workers)
    worker.kill()
    _wait(random)
    worker.start()


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
    worker = random.choice(world.workers)
    hung = worker.engine()
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


def stall_redis(world: World, random: Random) -> None:
    world.redis.freeze()
    time.sleep(STALL_S)
    world.redis.thaw()


def kill_postgres(world: World, random: Random) -> None:
    world.postgres.kill()
    _wait(random)
    world.postgres.start()


def stall_postgres(world: World, random: Random) -> None:
    world.postgres.freeze()
    time.sleep(STALL_S)
    world.postgres.thaw()


def kill_object_store(world: World, random: Random) -> None:
    """With all that it held."""
    world.s3.kill()
    _wait(random)
    world.s3.start()


def stall_object_store(world: World, random: Random) -> None:
    world.s3.freeze()
    time.sleep(STALL_S)
    world.s3.thaw()


def object_store_fails(world: World, random: Random) -> None:
    """Errors and cut bodies, of reading and writing, while a worker has to restore from there."""
    world.proxy.everything = True
    _from_object_store(world, random, random.choice(("500", "503", "cut", "reset")))


def object_store_lies(world: World, random: Random) -> None:
    """Shards with a wrong byte, while a worker has to restore them."""
    world.proxy.everything = False
    _from_object_store(world, random, "wrong")


def _from_object_store(world: World, random: Random, fault: str) -> None:
    worker = random.choice(world.workers)
    worker.kill()
    shutil.rmtree(worker.data_dir / "store", ignore_errors=True)
    flush_redis(world, random)
    world.proxy.fault = fault
    worker.start()
    time.sleep(STALL_S)
    world.proxy.fault = ""


def _wait(random: Random) -> None:
    time.sleep(random.uniform(0, 1.5))


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        kill_worker, lose_worker_disk, freeze_worker, hang_engine, stop_worker, kill_api, kill_redis, flush_redis,
        fill_redis, stall_redis, kill_postgres, stall_postgres, kill_object_store, stall_object_store,
        object_store_fails, object_store_lies,
    )
}  # fmt: skip
