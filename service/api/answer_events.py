"""Answer streams over HTTP: event bodies, the place of a returning reader, and clients that leave."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request

from service.api.problems import told_in_stream
from service.api.schemas.questions import AnswerBody
from service.core.streams import AnswerStream
from service.errors import ServiceError, Unavailable


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """An event ready to be sent."""

    id: int
    name: str
    data: Any


def position_after(last_event_id: str | None) -> int:
    """Where a reader with this `Last-Event-ID` is; an unknown id is at the beginning."""
    text = (last_event_id or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else 0


async def answer_events(stream: AnswerStream, after: int = 0) -> AsyncIterator[AnswerEvent]:
    """The stream's events beyond `after`; an error is told as a problem, with what a client needs to
    retry."""
    async with aclosing(stream.events(after)) as events:
        async for event in events:
            data = event.data
            if isinstance(data, ServiceError):
                data = {"id": stream.answer_id, **told_in_stream(data)}
            yield AnswerEvent(event.id, event.name, data)


async def whole_answer(
    request: Request[Any, Any, Any], stream: AnswerStream, stopping: asyncio.Event
) -> AnswerBody | None:
    """The answer once it is over, or None when the client left before. Raises the error it ended with."""
    over = asyncio.ensure_future(stream.wait_closed())
    left = asyncio.ensure_future(_disconnected(request))
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({over, left, stop}, return_when=asyncio.FIRST_COMPLETED)
        if stop.done() and not over.done():
            raise Unavailable("The server is shutting down: ask again.")
        if not over.done():
            return None
        data = over.result().data
    finally:
        for task in (over, left, stop):
            task.cancel()
    if isinstance(data, ServiceError):
        raise data
    return msgspec.convert(data, AnswerBody)


async def _disconnected(request: Request[Any, Any, Any]) -> None:
    # The body has been read: all that can come is the news that the client is gone.
    while (await request.receive())["type"] != "http.disconnect":
        pass
