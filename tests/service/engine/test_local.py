import asyncio
from contextlib import aclosing

import pytest

from service.engine.digests import digest_of
from service.engine.factory import EngineConfig, resolve_dtype
from service.engine.local import LocalEngine
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerStarted,
    AnswerText,
    BuildDone,
    BuildRequest,
    DocumentRef,
    Failed,
    Sampling,
)
from service.engine.protocol import EngineLost

pytestmark = pytest.mark.anyio
DOC = DocumentRef("own", "doc")
TOKENS = [i % 250 for i in range(300)]


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
async def engine(tmp_path):
    engine = await LocalEngine.open(EngineConfig(engine="fake", store_dir=str(tmp_path), fake_step_s=0.002))
    yield engine
    await engine.close()


def ask(name="a", max_tokens=100) -> AnswerRequest:
    return AnswerRequest(name, "s", DOC, digest_of(TOKENS), 300, [], [1, 2], Sampling(max_tokens), "kv")


async def every(events):
    return [event async for event in events]


async def test_build_and_answer_as_events(engine):
    assert isinstance((await every(engine.build(BuildRequest("b", DOC, TOKENS))))[-1], BuildDone)
    events = await every(engine.answer(ask()))
    assert isinstance(events[0], AnswerStarted)
    assert isinstance(events[-1], AnswerDone)
    text = "".join(e.text for e in events if isinstance(e, AnswerText))
    assert text == "This is the fake engine: it has no model."
    assert (await engine.stats()).resident_documents == 1
    assert await engine.check() > 0


async def test_closing_the_iterator_cancels_its_request(engine):
    await every(engine.build(BuildRequest("b", DOC, TOKENS)))
    async with aclosing(engine.answer(ask())) as events:
        await anext(events)
    for _ in range(6000):
        if not (await engine.stats()).running:
            break
        await asyncio.sleep(0.01)
    stats = await engine.stats()
    assert (stats.running, stats.tail_slots_used, stats.document_references) == (0, 0, 0)


async def test_cancel_release_and_close_reach_the_host(engine):
    await every(engine.build(BuildRequest("b", DOC, TOKENS)))
    events = engine.answer(ask())
    await anext(events)
    await anext(events)
    await engine.cancel("a")
    last = (await every(events))[-1]
    assert isinstance(last, AnswerDone)
    assert last.finish_reason == "cancelled"
    await engine.release_session("s")
    assert (await engine.stats()).tail_slots_used == 0
    assert (await engine.release(DOC)).objects == 1
    await engine.drain(1)
    refused = (await every(engine.answer(ask())))[-1]
    assert isinstance(refused, Failed)
    assert refused.code == "busy"
    await engine.close()
    assert not engine.alive
    with pytest.raises(EngineLost):
        await engine.check()


async def test_an_unknown_engine_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no engine 'abacus'"):
        await LocalEngine.open(EngineConfig(engine="abacus", store_dir=str(tmp_path)))


def test_compute_dtype_auto_is_one_of_the_two():
    assert resolve_dtype("auto") in ("float32", "bfloat16")
    assert resolve_dtype("float32") == "float32"
