"""A stream may be read by anyone at any time from any id: nothing is lost, nothing comes twice."""

import asyncio
import random

import pytest

from service.core.streams import AnswerStream, StreamEvent, closing_events

pytestmark = pytest.mark.anyio
PIECES = ["甲方", "于", "每月", " 👩‍👩‍👧", " é", "\n", "end", "."]
TEXT = "".join(PIECES)
CLOSING = closing_events(TEXT, [{"page": 1}, {"page": 2}], "done", {"answer": TEXT})


def new_stream(grace_s: float = 30.0) -> tuple[AnswerStream, list[str]]:
    abandoned: list[str] = []
    stream = AnswerStream("ans_1", "ses_1", grace_s=grace_s, on_abandoned=lambda: abandoned.append("now"))
    return stream, abandoned


async def produce(stream: AnswerStream) -> None:
    for piece in PIECES:
        stream.add_text(piece)
        await asyncio.sleep(0)
    stream.close(CLOSING)


def text_of(events: list[StreamEvent]) -> str:
    return "".join(event.data["text"] for event in events if event.name == "token")


async def test_live_reader_gets_everything_in_order() -> None:
    stream, _ = new_stream()
    producer = asyncio.create_task(produce(stream))
    events = [event async for event in stream.events()]
    await producer
    assert text_of(events) == TEXT
    assert [event.name for event in events[-3:]] == ["citation", "citation", "done"]
    ids = [event.id for event in events]
    assert ids == sorted(set(ids))


async def test_any_place_can_be_taken_up_live_and_afterwards() -> None:
    stream, _ = new_stream()
    producer = asyncio.create_task(produce(stream))
    live = [event async for event in stream.events()]
    await producer
    later = AnswerStream.finished("ans_1", "ses_1", TEXT, CLOSING)
    for seen, event in enumerate(live):
        for source in (stream, later):
            rest = [e async for e in source.events(event.id)]
            assert text_of(live[: seen + 1]) + text_of(rest) == TEXT
            assert [e for e in live[: seen + 1] + rest if e.name != "token"] == CLOSING
    assert later.is_over_after(live[-1].id)
    assert not later.is_over_after(live[-2].id)


async def test_readers_that_come_and_go_at_random_lose_nothing() -> None:
    random.seed(5)
    for _ in range(30):
        stream, abandoned = new_stream()
        producer = asyncio.create_task(produce(stream))
        got: list[StreamEvent] = []
        while not got or got[-1].name != "done":
            source = stream.events(got[-1].id if got else 0)
            for _ in range(random.randint(1, 3)):
                if (event := await anext(source, None)) is not None:
                    got.append(event)
            await source.aclose()
        await producer
        assert text_of(got) == TEXT
        assert got[-3:] == CLOSING
        assert not abandoned


async def test_a_slow_reader_gets_what_it_missed_as_one_event() -> None:
    stream, _ = new_stream()
    await produce(stream)
    events = [event async for event in stream.events()]
    assert [event.name for event in events] == ["token", "citation", "citation", "done"]


@pytest.mark.alone
async def test_abandoned_only_after_the_grace_time_without_readers() -> None:
    stream, abandoned = new_stream(grace_s=0.5)
    with stream.reader():
        await asyncio.sleep(0.6)
    assert abandoned == []
    await asyncio.sleep(0.1)
    with stream.reader(), stream.reader():
        pass
    await asyncio.sleep(0.1)
    assert abandoned == []
    await asyncio.sleep(0.6)
    assert abandoned == ["now"]


@pytest.mark.alone
async def test_a_new_answer_waits_for_its_first_reader_even_without_grace() -> None:
    stream, abandoned = new_stream(grace_s=0.0)
    await asyncio.sleep(0.03)
    assert abandoned == []
    with stream.reader():
        pass
    await asyncio.sleep(0.03)
    assert abandoned == ["now"]


async def test_a_closed_stream_is_never_abandoned() -> None:
    stream, abandoned = new_stream(grace_s=0.0)
    stream.close(CLOSING)
    with stream.reader():
        pass
    await asyncio.sleep(0.02)
    assert abandoned == []


async def test_waiting_for_the_end() -> None:
    stream, _ = new_stream()
    waiting = asyncio.create_task(stream.wait_closed())
    await produce(stream)
    assert (await waiting).data == {"answer": TEXT}
