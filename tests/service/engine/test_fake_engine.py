import asyncio
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from service.engine.digests import digest_of
from service.engine.fake import FakeEngine
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerStarted,
    AnswerText,
    BuildDone,
    BuildProgress,
    BuildRequest,
    DocumentRef,
    Failed,
    Retention,
    Sampling,
    SpanRef,
    TurnRef,
)

pytestmark = pytest.mark.anyio
DOC = DocumentRef("own", "doc")
TOKENS = list(range(600))


@pytest.fixture
def anyio_backend():
    return "asyncio"


def ask(name="r1", turns=(), max_tokens=16, kv_id="kv1") -> AnswerRequest:
    return AnswerRequest(
        name, "ses", DOC, digest_of(TOKENS), len(TOKENS), list(turns), [5, 6], Sampling(max_tokens), kv_id
    )


async def every(events):
    return [event async for event in events]


async def built(**more) -> FakeEngine:
    engine = FakeEngine(**more)
    await every(engine.build(BuildRequest("b1", DOC, TOKENS)))
    return engine


async def test_build_reports_progress_and_a_second_build_computes_nothing():
    engine = FakeEngine()
    events = await every(engine.build(BuildRequest("b", DOC, TOKENS)))
    assert [e.done for e in events if isinstance(e, BuildProgress) and e.stage == "prefilling"] == [
        256,
        512,
        600,
    ]
    assert isinstance(events[-1], BuildDone)
    assert events[-1].prefilled_tokens == 600
    again = (await every(engine.build(BuildRequest("b", DOC, TOKENS))))[-1]
    assert isinstance(again, BuildDone)
    assert (again.already, again.prefilled_tokens) == (True, 0)


async def test_answer_keeps_the_books_of_a_follow_up():
    engine = await built(reply=("汉", "字🙂"))
    started, *texts, done = await every(engine.answer(ask()))
    assert isinstance(started, AnswerStarted)
    assert (started.source, started.reused_tokens, started.prefilled_tokens) == ("host", 600, 2)
    assert "".join(e.text for e in texts if isinstance(e, AnswerText)) == "汉字🙂"
    assert isinstance(done, AnswerDone)
    assert (done.token_ids, done.pending_ids) == ([5, 6, 1000], [1001])
    follow_up = (await every(engine.answer(ask("r2", [TurnRef("kv1", done.token_ids)], kv_id="kv2"))))[0]
    assert isinstance(follow_up, AnswerStarted)
    assert (follow_up.reused_tokens, follow_up.miss_reason) == (603, None)
    lost = (await every(engine.answer(ask("r3", [TurnRef("kv9", [1, 2])]))))[0]
    assert isinstance(lost, AnswerStarted)
    assert (lost.reused_tokens, lost.prefilled_tokens, lost.miss_reason) == (600, 4, "absent")


async def test_max_tokens_cuts():
    engine = await built()
    done = (await every(engine.answer(ask(max_tokens=2))))[-1]
    assert isinstance(done, AnswerDone)
    assert (done.finish_reason, done.completion_tokens) == ("length", 2)


async def test_a_miss_happens_once_and_a_rebuild_heals_it():
    engine = await built()
    engine.miss_next("checksum")
    (missed,) = await every(engine.answer(ask()))
    assert isinstance(missed, Failed)
    assert (missed.code, missed.miss_reason) == ("snapshot_miss", "checksum")
    (absent,) = await every(engine.answer(ask()))
    assert isinstance(absent, Failed)
    assert absent.miss_reason == "absent"
    await every(engine.build(BuildRequest("b2", DOC, TOKENS)))
    assert isinstance((await every(engine.answer(ask())))[-1], AnswerDone)


async def test_loss_ends_open_streams_and_the_snapshot_survives():
    engine = await built(token_delay_s=30)
    stream = engine.answer(ask())
    assert isinstance(await anext(stream), AnswerStarted)
    asyncio.get_running_loop().call_later(0.01, engine.lose)
    (lost,) = await every(stream)
    assert isinstance(lost, Failed)
    assert (lost.code, lost.retryable) == ("engine_lost", True)
    assert isinstance((await every(engine.answer(ask())))[0], Failed)
    engine.come_back()
    engine.token_delay_s = 0
    started = (await every(engine.answer(ask())))[0]
    assert isinstance(started, AnswerStarted)
    assert started.source == "disk"


async def test_cancel_ends_the_stream_and_closing_it_frees_its_place():
    engine = await built(token_delay_s=30, max_batch=1)
    async with aclosing(engine.answer(ask("a"))) as stream:  # pyright: ignore[reportArgumentType]
        await anext(stream)
        assert (await engine.stats()).running == 1
        asyncio.get_running_loop().call_later(0.01, asyncio.ensure_future, engine.cancel("b"))
        (failed,) = await every(engine.answer(ask("b")))
        assert isinstance(failed, Failed)
        assert failed.code == "cancelled"
    assert (await engine.stats()).running == 0
    await engine.cancel("unknown")


async def test_release_ends_its_answers():
    engine = await built(token_delay_s=30)
    stream = engine.answer(ask())
    await anext(stream)
    released = await engine.release(DOC)
    assert released.objects == 1
    assert [e.code for e in await every(stream) if isinstance(e, Failed)] == ["cancelled"]


async def test_a_windowed_document_says_what_it_keeps_and_what_it_fetched():
    engine, kept = FakeEngine(), Retention(16, 64, 32, fetch_tokens=64)
    events = await every(engine.build(BuildRequest("b", DOC, TOKENS, kept)))
    assert [e.stage for e in events if isinstance(e, BuildProgress)][-2:] == ["compacting", "persisting"]
    assert (events[-1].resident_tokens, events[-1].prefilled_tokens) == (112, 600)
    assert events[-1].index_nbytes > 0
    first = await every(engine.answer(replace(ask(), retention=kept)))
    assert (first[0].spans, first[0].first_pass_tokens) == ([SpanRef(16, 32)], 2)
    assert (first[0].reused_tokens, first[0].prefilled_tokens) == (600, 2)
    turn = TurnRef("kv1", first[-1].token_ids, [SpanRef(100, 32)])
    second = await every(engine.answer(replace(ask("r2", [turn]), retention=kept)))
    assert second[0].spans == [SpanRef(16, 32), SpanRef(100, 32)]
    engine.fetched = [SpanRef(200, 96)]
    assert (await every(engine.answer(replace(ask("r3"), retention=kept))))[0].spans == [SpanRef(200, 96)]


async def test_another_retention_is_another_snapshot():
    engine = await built()
    assert (await every(engine.answer(replace(ask(), retention=Retention(16, 0, 32)))))[-1].code == "snapshot_miss"
