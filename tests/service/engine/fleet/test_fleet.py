"""Requests through a fleet: the same events as without one, wherever they are read."""

import asyncio
from contextlib import aclosing

import pytest

from service.engine.fake import FakeEngine
from service.engine.fleet.client import FleetClient
from service.engine.fleet.link import FleetSettings
from service.engine.messages import (
    AnswerDone,
    AnswerStarted,
    BuildDone,
    BuildProgress,
    BuildRequest,
    DocumentRef,
    Failed,
)
from service.engine.protocol import Attachable, EngineLost
from tests.service.engine.fleet.conftest import DOC, TOKENS, ask, build, every, text_of, until

pytestmark = pytest.mark.anyio


async def test_a_document_is_built_and_asked_about(fleet):
    engine = await fleet.worker("w")
    client = await fleet.client()
    *progress, done = await build(client)
    assert isinstance(done, BuildDone)
    assert done.prefilled_tokens == len(TOKENS)
    assert {type(event) for event in progress} == {BuildProgress}
    started, *texts, last = await every(client.answer(ask()))
    assert isinstance(started, AnswerStarted)
    assert text_of(texts) == "The answer is 42."
    assert isinstance(last, AnswerDone)
    assert len(engine.answered) == 1


async def test_a_client_is_an_engine_that_can_be_attached_to(fleet):
    await fleet.worker("w")
    client = await fleet.client()
    assert isinstance(client, Attachable)
    assert client.alive
    assert client.info.model_name == "fake"
    assert await client.check() >= 0
    await until(lambda: client.workers[0].state.stats is not None)
    assert (await client.stats()).running == 0


async def test_many_answers_at_once_are_not_mixed_up(fleet):
    await fleet.worker("w", FakeEngine(lambda request: [request.request_id[:4], "-"] * 20, max_batch=64))
    client = await fleet.client()
    await build(client)
    names = [f"q{n:03d}" for n in range(60)]
    answers = await asyncio.gather(*(every(client.answer(ask(name, session=name))) for name in names))
    for name, events in zip(names, answers, strict=True):
        assert text_of(events) == f"{name}-" * 20


async def test_another_process_replays_a_running_answer_and_one_that_is_over(fleet):
    await fleet.worker("w", FakeEngine([f"{n} " for n in range(100)], token_delay_s=0.005))
    first, second = await fleet.client(), await fleet.client()
    await build(first)
    own = asyncio.create_task(every(first.answer(ask("x"))))
    await until(lambda: fleet.engines["w"].answered)
    await asyncio.sleep(0.1)
    attached = await every(second.attach("x"))
    assert attached == await own
    assert text_of(attached) == "".join(f"{n} " for n in range(100))
    assert await every(second.attach("x")) == attached
    assert await every(first.attach("x")) == attached


async def test_nothing_is_known_of_an_answer_that_never_was(fleet):
    await fleet.worker("w")
    (failed,) = await every((await fleet.client()).attach("never"))
    assert failed.code == "unknown_request"
    assert failed.retryable


async def test_one_attempt_after_another_is_attached_to_the_latest(fleet):
    await fleet.worker("w")
    client = await fleet.client()
    (missed,) = await every(client.answer(ask("x")))
    assert missed.code == "snapshot_miss"
    await build(client)
    events = await every(client.answer(ask("x")))
    assert await every(client.attach("x")) == events
    assert text_of(events) == "The answer is 42."


async def test_a_document_goes_to_another_worker_when_a_disk_is_full(fleet):
    one, other = await fleet.worker("w1"), await fleet.worker("w2")
    client = await fleet.client()
    full = Failed("storage", "the disk is full")
    one.fail_next("build", full)
    events = await build(client)
    assert isinstance(events[-1], BuildDone)
    assert DOC in other.snapshots
    for engine in (one, other):
        engine.fail_next("build", full)
    assert (await build(client, DocumentRef("own", "another")))[-1] == full


async def test_a_worker_whose_engine_restarts_leaves_requests_to_others(fleet):
    one, other = await fleet.worker("w1"), await fleet.worker("w2")
    client = await fleet.client()
    one.lose()
    assert isinstance((await build(client))[-1], BuildDone)
    assert DOC in other.snapshots
    other.lose()
    (busy,) = await build(client, DocumentRef("own", "another"))
    assert busy.code == "busy"
    one.come_back()
    other.come_back()


async def test_cancelling_from_another_process(fleet):
    await fleet.worker("w", FakeEngine(["x"] * 5000, token_delay_s=0.01))
    first, second = await fleet.client(), await fleet.client()
    await build(first)
    running = asyncio.create_task(every(first.answer(ask("x"))))
    await until(lambda: fleet.engines["w"].answered)
    await second.cancel("x")
    async with asyncio.timeout(60):
        events = await running
    assert isinstance(events[-1], Failed)
    assert events[-1].code == "cancelled"
    await second.cancel("unknown")


async def test_leaving_an_answer_cancels_it_but_leaving_an_attached_one_does_not(fleet):
    engine = await fleet.worker("w", FakeEngine(["x"] * 5000, token_delay_s=0.01))
    client = await fleet.client()
    await build(client)
    async with aclosing(client.answer(ask("x"))) as events:
        await anext(events)
        async with aclosing(client.attach("x")) as attached:
            await anext(attached)
        await asyncio.sleep(0.2)
        assert (await engine.stats()).running == 1
    async with asyncio.timeout(60):
        while (await engine.stats()).running:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def test_a_document_is_released_and_deleted_everywhere(fleet):
    deleted = []

    def delete(*key):
        deleted.append(key)
        return {"disk": (1, 100)}

    await fleet.worker("w1", delete=delete)
    await fleet.worker("w2", delete=delete)
    client = await fleet.client()
    for engine in fleet.engines.values():
        await every(engine.build(BuildRequest("b", DOC, TOKENS)))
    released = await client.release(DOC)
    assert released.objects == 2
    assert (await client.delete("own", [("document", "doc"), ("turn", "t")])).nbytes == 400
    assert sorted(deleted) == [("own", "document", "doc")] * 2 + [("own", "turn", "t")] * 2
    await client.release_session("s")


async def test_without_a_worker_a_client_does_not_start(redis_server):
    client = FleetClient(redis_server.url, heartbeat_s=0.1)
    with pytest.raises(EngineLost, match="preread worker"):
        await client.start(0.3)


async def test_a_client_waits_for_a_worker_of_its_own_model(fleet):
    """What another model told in Redis is none of its own either."""
    await fleet.worker("w")
    await fleet.client()
    other = FleetClient(fleet.url, heartbeat_s=0.1, understands=lambda info: info.model_name == "another")
    with pytest.raises(EngineLost, match=r"those that are there have another model or prompt \(fake\)"):
        await other.start(0.5)


async def test_a_client_starts_without_workers_when_there_were_some(fleet):
    await fleet.worker("w")
    await fleet.client()
    await asyncio.sleep(0.2)
    await fleet.draining("w")
    late = FleetClient(fleet.url, heartbeat_s=0.1)
    await late.start(5)
    assert not late.alive
    assert late.info.model_name == "fake"
    (failed,) = await every(late.answer(ask()))
    assert (failed.code, failed.retryable) == ("engine_lost", True)
    (unsent,) = await every(late.build(BuildRequest("b", DocumentRef("own", "d"), TOKENS)))
    assert (unsent.code, unsent.retryable) == ("busy", True)
    await late.close()


@pytest.mark.parametrize("url", ["http://x", "redis://h:port/0", "redis://h/0?unknown_option=1"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(FleetSettings, match="PREREAD_FLEET_URL"):
        FleetClient(url)
