"""An event stream ends cleanly whoever ends it."""

import asyncio
import json
from collections import namedtuple

import pytest

from service.api.sse import event_stream
from service.errors import Conflict, Unavailable

Event = namedtuple("Event", "id name data")


def chunks_of(response):
    return aiter(response.iterator)


async def source(log, *items, then=None):
    try:
        for item in items:
            yield item
        if then is not None:
            await then()
    finally:
        await asyncio.sleep(0)
        log.append("closed")


@pytest.mark.anyio
async def test_events_have_id_name_and_json():
    log = []
    events = source(log, Event(1, "token", {"text": "a\nb \N{PARTY POPPER}"}), Event("x", "done", {}))
    chunks = [chunk async for chunk in chunks_of(event_stream(events, heartbeat_s=9))]
    assert chunks[0].decode() == 'id: 1\r\nevent: token\r\ndata: {"text":"a\\nb \N{PARTY POPPER}"}\r\n\r\n'
    assert chunks[1] == b"id: x\r\nevent: done\r\ndata: {}\r\n\r\n"
    assert log == ["closed"]


@pytest.mark.anyio
async def test_a_quiet_stream_gets_comments():
    enough, comments = asyncio.Event(), []
    events = source([], Event(1, "a", 0), then=enough.wait)
    async for chunk in chunks_of(event_stream(events, heartbeat_s=0.05)):
        if chunk.startswith(b":"):
            comments.append(chunk)
        if len(comments) == 2:
            enough.set()
    assert len(comments) >= 2
    assert b"data" not in comments[0]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (Conflict("busy"), 409, {"retryable": False, "retry_after_s": None}),
        (RuntimeError("secret"), 500, {"retryable": False, "retry_after_s": None}),
        (Unavailable("The database does not answer.", retry_after_s=3), 503, {"retryable": True, "retry_after_s": 3}),
    ],
)
async def test_an_error_is_the_last_event(error, status, retry):
    async def fail():
        raise error

    log = []
    chunks = [c async for c in chunks_of(event_stream(source(log, Event(1, "a", 0), then=fail), heartbeat_s=9))]
    assert chunks[-1].startswith(b"event: error\r\n")
    assert f'"status":{status}'.encode() in chunks[-1]
    assert b"secret" not in chunks[-1]
    told = json.loads(chunks[-1].partition(b"data: ")[2])
    assert {name: told[name] for name in retry} == retry
    assert log == ["closed"]


@pytest.mark.anyio
async def test_a_reader_that_leaves_closes_the_source():
    log = []
    chunks = chunks_of(event_stream(source(log, Event(1, "a", 0), then=asyncio.Event().wait), heartbeat_s=9))
    assert await anext(chunks)
    reading = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.wait({reading})
    assert log == ["closed"]


@pytest.mark.anyio
async def test_a_server_that_stops_says_so():
    log, stopping = [], asyncio.Event()
    events = source(log, Event(1, "a", 0), then=asyncio.Event().wait)
    chunks = chunks_of(event_stream(events, heartbeat_s=9, stopping=stopping))
    assert await anext(chunks)
    stopping.set()
    assert b'"status":503' in await anext(chunks)
    assert [chunk async for chunk in chunks] == []
    assert log == ["closed"]
