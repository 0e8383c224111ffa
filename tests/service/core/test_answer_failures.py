"""What goes wrong while answering: the engine, the snapshot, the disk, a reader that leaves, a stop."""

import asyncio
import time
from contextlib import suppress

import pytest
from sqlalchemy import text as sql
from sqlalchemy.exc import OperationalError

from service.core.quotas import day_of
from service.core.streams import StreamEvent
from service.engine.messages import Failed
from service.errors import Busy, CommitUnknown, ServiceError, StorageFull, TooLong, Unavailable

pytestmark = pytest.mark.anyio


async def test_engine_that_is_down(world) -> None:
    session_id = await world.session()
    world.engine.lose()
    with pytest.raises(Unavailable) as refused:
        await world.ask(session_id)
    assert refused.value.retry_after_s >= 1
    world.engine.come_back()
    assert (await world.answer(session_id))["answer"]


async def test_engine_lost_in_mid_answer(world) -> None:
    world.engine.token_delay_s = 0.3
    session_id = await world.session()
    stream = await world.ask(session_id)
    events: list[StreamEvent] = []
    async for event in stream.events():
        events.append(event)
        if len(events) == 1:
            world.engine.lose()
    assert [e.name for e in events] == ["token", "error"]
    assert isinstance(events[-1].data, Unavailable)
    assert events[-1].data.code == "engine_lost"
    _, turns = await world.sessions.get(world.owner, session_id)
    assert (turns[0].status, turns[0].error_code, turns[0].answer) == ("failed", "engine_lost", "The ")
    world.engine.come_back()
    await world.answer(session_id)
    assert world.engine.answered[-1].turns == []
    again = await world.answers.stream(world.owner, session_id, stream.answer_id)
    assert [(e.id, e.name) async for e in again.events(events[0].id)] == [(events[-1].id, "error")]


async def test_an_end_that_was_kept_and_not_confirmed_is_kept_once(world, monkeypatch) -> None:
    """The database goes away after a commit, before its reply."""
    turns, kept = world.answers._turns, []
    write = turns._write

    async def unheard(*arguments):
        kept.append(await write(*arguments))
        if len(kept) == 1:
            raise CommitUnknown("The database does not answer: try again.")
        return kept[-1]

    monkeypatch.setattr(turns, "_write", unheard)
    answer = await world.answer(await world.session())
    assert (answer["answer"], kept) == ("The answer is 42.", [True, False])
    usage = answer["usage"]
    async with world.database.reading() as uow:
        counted = await uow.records.tokens(world.owner, day_of(time.time()))
    assert counted == usage["prefilled_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("reason", ["checksum", "truncated", "fingerprint", "canary"])
async def test_lost_snapshot_is_rebuilt_and_told(world, reason: str) -> None:
    session_id = await world.session()
    await world.answer(session_id, "One?")
    world.engine.miss_next(reason)
    answer = await world.answer(session_id, "Two?")
    request = world.engine.answered[-1]
    assert world.snapshots.rebuilt == ["doc_1"]
    assert answer["answer"] == "The answer is 42."
    assert answer["cache"] == {
        "source": "none", "restored_tokens": 0, "restore_ms": 0.0, "miss_reason": reason,
    }  # fmt: skip
    assert answer["usage"]["prefilled_tokens"] == 600 + len(request.prompt_ids)
    assert answer["usage"]["reused_tokens"] == len(request.turns[0].token_ids)


async def test_snapshot_lost_twice_is_not_tried_for_ever(world) -> None:
    world.engine.miss_next()
    world.engine.miss_next()
    with pytest.raises(Unavailable) as failed:
        await world.answer(await world.session())
    assert failed.value.code == "snapshot_miss"
    assert world.snapshots.rebuilt == ["doc_1"]


async def test_rebuild_that_fails(world) -> None:
    session_id = await world.session()
    world.engine.miss_next()
    world.snapshots.error = StorageFull("no room")
    with pytest.raises(StorageFull):
        await world.answer(session_id)
    world.snapshots.error = None
    assert (await world.answer(session_id))["cache"]["source"] == "none"


@pytest.mark.parametrize(
    ("code", "kind"),
    [("busy", Busy), ("too_long", TooLong), ("storage", StorageFull), ("internal", ServiceError)],
)
async def test_failures_of_the_engine(world, code: str, kind: type[ServiceError]) -> None:
    session_id = await world.session()
    world.engine.fail_next("answer", Failed(code, "for a reason"))
    with pytest.raises(kind):
        await world.answer(session_id)
    assert (await world.answer(session_id))["answer"]
    assert world.engine.answered[-1].turns == []


async def test_abandoned_answer_is_cancelled_and_the_session_goes_on(world) -> None:
    world.engine.reply = ["x"] * 500
    world.engine.token_delay_s = 0.02
    session_id = await world.session()
    stream = await world.ask(session_id)
    async for _ in stream.events():
        break
    await world.until_idle()
    _, turns = await world.sessions.get(world.owner, session_id)
    assert (turns[0].status, turns[0].finish_reason) == ("cancelled", "cancelled")
    assert 0 < len(turns[0].answer) < 400
    assert turns[0].answer == stream.text
    world.engine.reply = ["ok"]
    assert (await world.answer(session_id))["answer"] == "ok"


@pytest.mark.alone
async def test_reader_that_returns_in_time_gets_the_rest(world) -> None:
    world.conversations = world.build(grace_s=5)
    world.engine.reply = [f"{n} " for n in range(40)]
    world.engine.token_delay_s = 0.003
    session_id = await world.session()
    stream = await world.ask(session_id)
    got: list[StreamEvent] = []
    while not got or got[-1].name != "done":
        source = await world.answers.stream(world.owner, session_id, stream.answer_id)
        async for event in source.events(got[-1].id if got else 0):
            got.append(event)
            if len(got) % 7 == 0:
                break
        await asyncio.sleep(0.005)
    assert "".join(e.data["text"] for e in got if e.name == "token") == "".join(world.engine.reply)
    assert got[-1].data["finish_reason"] == "stop"


@pytest.mark.alone
async def test_cancelled_while_rebuilding(world) -> None:
    world.engine.chunk_delay_s = 60
    session_id = await world.session()
    world.engine.miss_next()
    stream = await world.ask(session_id)
    waiting = asyncio.create_task(stream.wait_closed())
    await asyncio.sleep(0.02)
    waiting.cancel()
    async with asyncio.timeout(20):
        await world.until_idle()
    assert stream.last_event is not None
    assert stream.last_event.data["finish_reason"] == "cancelled"
    assert world.engine.answered == []


async def test_restart_fails_what_was_running(world) -> None:
    world.engine.token_delay_s = 10
    session_id = await world.session()
    stream = await world.ask(session_id)
    later = world.build()
    await later.recover()
    _, turns = await later.sessions.get(world.owner, session_id)
    assert (turns[0].status, turns[0].error_code) == ("failed", "interrupted")
    events = [e async for e in (await later.answers.stream(world.owner, session_id, stream.answer_id)).events()]
    assert [e.name for e in events] == ["error"]


async def test_close_stores_what_there_is_and_refuses_more(world) -> None:
    world.engine.reply = ["a"] * 1000
    world.engine.token_delay_s = 0.005
    session_id = await world.session()
    stream = await world.ask(session_id)
    await asyncio.sleep(0.03)
    await world.answers.close()
    assert stream.closed
    assert (await world.sessions.get(world.owner, session_id))[1][0].status == "cancelled"
    with pytest.raises(Unavailable):
        await world.ask(session_id)


async def test_full_disk_when_a_question_begins(world) -> None:
    sessions = [await world.session() for _ in range(10)]
    await fill_disk(world)
    refused = None
    for session_id in sessions:  # the first ones may still fit into half-empty pages of the file
        try:
            await (await world.ask(session_id, "q" * 1300, stop=("s" * 200,) * 8)).wait_closed()
        except StorageFull:
            refused = session_id
            break
    await empty_disk(world)
    assert refused is not None
    assert (await world.sessions.get(world.owner, refused))[1] == []
    assert world.conversations.admission.admitted == 0
    assert (await world.answer(refused))["answer"]


async def test_full_disk_when_an_answer_ends(world) -> None:
    session_id = await world.session()
    await world.answer(session_id, "One?")
    world.engine.token_delay_s = 1.0  # the disk is full by then
    world.engine.reply = ["long " * 20_000]
    stream = await world.ask(session_id, "Two?")
    await fill_disk(world)
    event = await stream.wait_closed()
    assert isinstance(event.data, StorageFull)
    assert world.files.removed == [stream.answer_id]
    await empty_disk(world)
    world.engine.reply, world.engine.token_delay_s = ["ok"], 0.0
    await world.answer(session_id, "Three?")
    assert len(world.engine.answered[-1].turns) == 1
    _, turns = await world.sessions.get(world.owner, session_id)
    assert [turn.status for turn in turns] == ["done", "failed", "done"]
    assert turns[1].answer == ""


async def fill_disk(world) -> None:
    """Every connection of the pool refuses to let the database file grow, and its free pages are used up."""
    await pragma(world, "max_page_count=1")
    columns, values = "document_id, number, text, token_start, token_end", "hex(zeroblob(1700)), 0, 0"
    filler = sql(f"INSERT INTO pages ({columns}) SELECT 'doc_2', max(number) + 1, {values} FROM pages")
    async with world.database.engine.connect() as connection:
        with suppress(OperationalError):
            for _ in range(1000):
                await connection.execute(filler)
                await connection.commit()


async def empty_disk(world) -> None:
    await pragma(world, "max_page_count=1000000")


async def pragma(world, setting: str) -> None:
    async with world.database.engine.connect() as one, world.database.engine.connect() as two:
        for connection in (one, two):
            await connection.execute(sql(f"PRAGMA {setting}"))


async def test_nothing_is_left_behind_by_many_readers_that_leave(world) -> None:
    world.conversations = world.build(queue_limit=32, grace_s=0.0)
    world.engine.reply = ["x"] * 50
    world.engine.token_delay_s = 0.001
    sessions = [await world.session() for _ in range(12)]

    async def ask_and_leave(session_id: str) -> None:
        stream = await world.ask(session_id)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await stream.wait_closed()

    for _ in range(3):
        await asyncio.gather(*(ask_and_leave(session_id) for session_id in sessions))
        await world.until_idle()
    assert world.conversations.admission.admitted == 0
    assert (await world.engine.stats()).running == 0
