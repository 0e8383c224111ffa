"""Another Redis takes over: the one before may stay connected and take nothing, the next may lack what that had."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from service.engine.fake import FakeEngine
from service.engine.fleet.client import FleetClient
from service.engine.fleet.link import Link, LinkDown, refused
from tests.cache_store.tiers.servers import RedisServer
from tests.chaos.wire import Wire
from tests.service.engine.fleet.conftest import Fleet, ask, build, every, text_of, until
from tests.service.engine.fleet.test_faults import LONG, asked_again, is_lost

pytestmark = pytest.mark.anyio


@pytest.fixture
def second(tmp_path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
async def wired(redis_server):
    """A fleet whose workers and whose clients have a `Wire` each."""
    made = Fleet("")
    made.to_workers, made.to_clients = Wire(redis_server.port), Wire(redis_server.port)
    yield made
    await made.close()
    for wire in (made.to_workers, made.to_clients):
        await asyncio.to_thread(wire.close)


async def one_of_each(wired: Fleet, engine: FakeEngine) -> FleetClient:
    """A worker, and a client with a document."""
    wired.url = f"redis://127.0.0.1:{wired.to_workers.port}/0"
    await wired.worker("w", engine)
    wired.url = f"redis://127.0.0.1:{wired.to_clients.port}/0"
    client = await wired.client()
    await build(client)
    return client


def turn_to(wired: Fleet, server: RedisServer, *, reset: bool = True) -> None:
    wired.to_workers.turn_to(server.port, reset=reset)
    wired.to_clients.turn_to(server.port, reset=reset)


def copied(source: RedisServer, target: RedisServer) -> None:
    """The target has what the source has now, and takes writes of its own from then on."""
    client, of_source = target.client(), source.client()
    of_source.config_set("repl-diskless-sync-delay", 0)
    of_source.close()
    client.execute_command("REPLICAOF", "127.0.0.1", source.port)
    until_s = time.monotonic() + 60
    while client.info("replication")["master_link_status"] != "up":
        assert time.monotonic() < until_s
        time.sleep(0.02)
    client.execute_command("REPLICAOF", "NO", "ONE")
    client.close()


async def test_a_redis_that_became_a_replica_is_left_for_the_one_that_took_over(wired, redis_server, second):
    client = await one_of_each(wired, FakeEngine(LONG))
    turn_to(wired, second, reset=False)
    before = redis_server.client()
    before.execute_command("REPLICAOF", "127.0.0.1", second.port)
    try:
        await until(lambda: not client.alive)
        assert text_of(await asked_again(client)) == "".join(LONG)
    finally:
        before.execute_command("REPLICAOF", "NO", "ONE")
        before.close()


async def test_a_question_that_the_next_redis_lacks_is_not_waited_for(wired, redis_server, second):
    client = await one_of_each(wired, FakeEngine(LONG))
    await asyncio.to_thread(copied, redis_server, second)
    wired.to_workers.set("stall")
    late = asyncio.create_task(every(client.answer(ask("late"))))
    asked = redis_server.client()
    await until(lambda: asked.exists("preread:fleet:request:late"))
    asked.close()
    await asyncio.to_thread(turn_to, wired, second)
    async with asyncio.timeout(60):
        assert is_lost(await late)
    assert text_of(await asked_again(client)) == "".join(LONG)


async def test_a_registration_that_comes_back_is_not_another_worker(wired, redis_server, second):
    """The next server has an epoch of this worker that is over: it registers again, rather than to end."""
    client = await one_of_each(wired, FakeEngine(LONG))
    await asyncio.to_thread(copied, redis_server, second)
    (now,) = client.workers
    old = second.client()
    old.hset("preread:fleet:worker:w", "epoch", "before")
    old.persist("preread:fleet:worker:w")
    old.close()
    await asyncio.to_thread(turn_to, wired, second)
    await until(lambda: client.workers and client.workers[0].state.epoch not in (now.state.epoch, "before"))
    assert not wired.task("w").done()
    assert text_of(await asked_again(client)) == "".join(LONG)


async def test_no_connection_stays_with_a_redis_whose_place_another_has(wired, second):
    """The one before goes on, and takes what it is sent; only some of the connections break."""
    client = await one_of_each(wired, FakeEngine(LONG))
    turn_to(wired, second, reset=False)
    await wired.workers["w"]._link.close()
    await client._link.close()
    assert text_of(await asked_again(client)) == "".join(LONG)
    there = second.client()
    await until(lambda: there.exists("preread:fleet:info"))
    there.close()


async def test_a_script_that_an_older_redis_refuses_as_a_replica_is_understood(redis_server):
    link = Link(redis_server.url)
    said = "ERR Error running script (call to f_1): @user_script: 7: -READONLY You can't write against a replica."
    with suppress(LinkDown):
        assert refused(await link.ask(("EVAL", "return redis.error_reply(ARGV[1])", 0, said)))
    await until(lambda: link._connection is None)
    assert await link.ask(("PING",)) == [b"PONG"]
    await link.close()
