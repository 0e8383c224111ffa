"""What breaks between an API process and its workers: each ends with an answer or with a retryable error, and heals."""

import asyncio

import pytest

from service.engine.fake import FakeEngine
from service.engine.fleet.worker import WorkerReplaced
from service.engine.messages import AnswerDone, BuildDone, BuildRequest, Failed
from tests.cache_store.tiers.servers import RedisServer
from tests.service.engine.fleet.conftest import DOC, HEARTBEAT_S, TOKENS, Fleet, ask, build, every, text_of, until

pytestmark = pytest.mark.anyio
LONG = [f"{n} " for n in range(120)]


@pytest.fixture
async def own(tmp_path):
    """A fleet over a Redis that may be killed."""
    server = RedisServer(tmp_path)
    made = Fleet(server.url)
    made.redis = server
    yield made
    await made.close()
    server.kill()


async def running_answer(client, fleet, engine: FakeEngine, name: str = "x") -> asyncio.Task:
    """An answer that has begun."""
    if not engine.snapshots:
        await build(client)
    before = len(engine.answered)
    task = asyncio.create_task(every(client.answer(ask(name))))
    await until(lambda: len(engine.answered) > before)
    await asyncio.sleep(0.05)
    assert not task.done()
    return task


async def asked_again(client) -> list:
    """The answer, asked for as often as it takes: only retryable errors may come before."""
    async with asyncio.timeout(60):
        for n in range(1000):
            events = await every(client.answer(ask(f"again{n}")))
            if isinstance(events[-1], AnswerDone):
                return events
            assert events[-1].retryable, events[-1]
            await asyncio.sleep(0.05)
    raise AssertionError


def is_lost(events: list) -> bool:
    return isinstance(events[-1], Failed) and events[-1].code == "engine_lost" and events[-1].retryable


async def test_redis_forgets_everything(fleet, redis_server):
    engine = await fleet.worker("w", FakeEngine(LONG, token_delay_s=0.01))
    client = await fleet.client()
    task = await running_answer(client, fleet, engine)
    (before,) = client.workers
    connection = redis_server.client()
    connection.flushall()
    connection.close()
    async with asyncio.timeout(60):
        assert is_lost(await task)
    await until(lambda: client.alive and client.workers[0].state.epoch != before.state.epoch)
    assert text_of(await asked_again(client)) == "".join(LONG)
    assert (await engine.stats()).running == 0


async def test_redis_forgets_everything_while_a_document_is_read(fleet, redis_server):
    await fleet.worker("w", FakeEngine(chunk_delay_s=0.3))
    client = await fleet.client()
    task = asyncio.create_task(build(client))
    await asyncio.sleep(0.3)
    connection = redis_server.client()
    connection.flushall()
    connection.close()
    async with asyncio.timeout(60):
        events = await task
        while not isinstance(events[-1], BuildDone):
            assert events[-1].retryable, events[-1]
            await asyncio.sleep(0.1)
            events = await build(client, name="again")


async def test_redis_is_killed_and_comes_back_empty(own):
    engine = await own.worker("w", FakeEngine(LONG, token_delay_s=0.01))
    client = await own.client()
    task = await running_answer(client, own, engine)
    own.redis.kill()
    async with asyncio.timeout(60):
        assert is_lost(await task)
    assert not client.alive
    assert is_lost(await every(client.answer(ask("y"))))
    own.redis.start()
    assert text_of(await asked_again(client)) == "".join(LONG)


@pytest.mark.parametrize("beats", [1.0, 8.0])
async def test_redis_stands_still(own, beats):
    engine = await own.worker("w", FakeEngine(LONG, token_delay_s=0.01))
    client = await own.client()
    task = await running_answer(client, own, engine)
    own.redis.freeze()
    await asyncio.sleep(beats * HEARTBEAT_S)
    own.redis.thaw()
    async with asyncio.timeout(60):
        events = await task
    assert is_lost(events) if beats > 3 else text_of(events) == "".join(LONG)
    assert text_of(await asked_again(client)) == "".join(LONG)


async def test_connections_break_and_nothing_is_lost(fleet, redis_server):
    engine = await fleet.worker("w", FakeEngine(LONG, token_delay_s=0.005))
    client = await fleet.client()
    task = await running_answer(client, fleet, engine)
    connection = redis_server.client()
    for _ in range(5):
        connection.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await asyncio.sleep(0.1)
    connection.close()
    async with asyncio.timeout(60):
        events = await task
    assert text_of(events) == "".join(LONG)
    assert isinstance(events[-1], AnswerDone)


async def test_redis_is_full(own):
    engine = await own.worker("w", FakeEngine(LONG, token_delay_s=0.01))
    client = await own.client()
    task = await running_answer(client, own, engine)
    connection = own.redis.client()
    connection.config_set("maxmemory", "1")
    async with asyncio.timeout(60):
        assert is_lost(await task)
    assert is_lost(await every(client.answer(ask("y"))))
    connection.config_set("maxmemory", "0")
    connection.close()
    assert text_of(await asked_again(client)) == "".join(LONG)


async def test_an_event_that_is_missing_is_noticed(fleet, redis_server):
    await fleet.worker("w", FakeEngine(LONG, token_delay_s=0.002))
    client, other = await fleet.client(), await fleet.client()
    await build(client)
    events = await every(client.answer(ask("x")))
    connection = redis_server.client()
    (key,) = connection.keys("preread:fleet:events:x:*")
    entries = connection.xrange(key)
    assert len(entries) > 5
    connection.xdel(key, entries[3][0])
    connection.close()
    damaged = await every(other.attach("x"))
    assert is_lost(damaged)
    assert damaged[:-1] == events[: len(damaged) - 1]


async def test_an_engine_that_crashes_is_a_retryable_error(fleet):
    engine = await fleet.worker("w", FakeEngine(LONG, token_delay_s=0.01))
    client = await fleet.client()
    task = await running_answer(client, fleet, engine)
    engine.lose()
    async with asyncio.timeout(60):
        assert is_lost(await task)
    await until(lambda: not client.alive)
    engine.come_back()
    assert text_of(await asked_again(client)) == "".join(LONG)


async def test_a_worker_that_drains_ends_its_answers_and_takes_no_more(fleet):
    engine = await fleet.worker("w1", FakeEngine(LONG, token_delay_s=0.005))
    client = await fleet.client()
    task = await running_answer(client, fleet, engine)
    other = await fleet.worker("w2", FakeEngine(LONG))
    await every(other.build(BuildRequest("b", DOC, TOKENS)))
    ended = fleet.draining("w1")
    events = await every(client.answer(ask("y")))
    async with asyncio.timeout(60):
        assert text_of(await task) == "".join(LONG)
        await ended
    assert len(engine.answered) == 1
    assert text_of(events) == "".join(LONG) or is_lost(events)
    assert text_of(await asked_again(client)) == "".join(LONG)
    assert other.answered


async def test_a_worker_that_must_not_wait_longer_hands_its_answers_back(fleet):
    engine = await fleet.worker("w", FakeEngine(LONG, token_delay_s=0.05), grace_s=0.2)
    client = await fleet.client()
    task = await running_answer(client, fleet, engine)
    async with asyncio.timeout(60):
        await fleet.draining("w")
        assert is_lost(await task)
    await until(lambda: not client.workers)


async def test_of_two_workers_of_one_name_the_later_one_stays(fleet):
    await fleet.worker("w", FakeEngine(["old"]))
    client = await fleet.client()
    (before,) = client.workers
    replaced = fleet.task("w")
    await fleet.worker("w", FakeEngine(["new"]))
    with pytest.raises(WorkerReplaced, match=r"worker\.id"):
        await asyncio.wait_for(replaced, 10)
    await until(lambda: client.workers and client.workers[0].life != before.life)
    await build(client)
    assert text_of(await every(client.answer(ask()))) == "new"


async def test_a_build_goes_on_after_a_worker_is_gone(fleet):
    slow = await fleet.worker("w1", FakeEngine(chunk_delay_s=2), grace_s=0.0)
    client = await fleet.client()
    task = asyncio.create_task(build(client))
    await until(lambda: slow.built)
    await fleet.worker("w2")
    await fleet.draining("w1")
    async with asyncio.timeout(60):
        (*_, failed) = await task
    assert failed.retryable
    await until(lambda: len(client.workers) == 1 and client.workers[0].id == "w2")
    assert isinstance((await build(client))[-1], BuildDone)
