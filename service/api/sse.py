"""Server-sent events: ids, a comment on quiet streams, and a clean end whoever leaves first."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Protocol

import anyio
import msgspec
import structlog
from litestar.response import ServerSentEvent
from litestar.response.sse import ServerSentEventMessage

from service.api.problems import problem_of
from service.errors import ServiceError, Unavailable

CLEANUP_S = 5.0
_encode = msgspec.json.Encoder().encode
_log = structlog.get_logger("preread.api")


class Event(Protocol):
    """One event: its name, a JSON-able body, and the id a client sends back as `Last-Event-ID`."""

    @property
    def id(self) -> int | str: ...
    @property
    def name(self) -> str: ...
    @property
    def data(self) -> Any: ...


def event_stream(
    events: AsyncIterator[Event], *, heartbeat_s: float, stopping: asyncio.Event | None = None
) -> ServerSentEvent:
    """Send `events` as they come. The iterator is closed in every case: at its end, on an error (told as an
    `error` event with the problem as body), when the client leaves, and when `stopping` is set."""
    return ServerSentEvent(_messages(events, heartbeat_s, stopping or asyncio.Event()))


async def _messages(
    events: AsyncIterator[Event], heartbeat_s: float, stopping: asyncio.Event
) -> AsyncIterator[ServerSentEventMessage]:
    stop = asyncio.ensure_future(stopping.wait())
    upcoming: asyncio.Future[Event | None] = asyncio.ensure_future(_next(events))
    try:
        while True:
            await asyncio.wait({upcoming, stop}, timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if upcoming.done():
                event = upcoming.result()
                if event is None:
                    return
                yield _message(event)
                upcoming = asyncio.ensure_future(_next(events))
            elif stop.done():
                yield _problem(Unavailable("The server is shutting down: take the stream up again."))
                return
            else:
                yield ServerSentEventMessage(data=None, comment="still here")
    except Exception as error:
        if not isinstance(error, ServiceError):
            _log.error("stream failed", error=type(error).__name__, exc_info=error)
        yield _problem(error)
    finally:
        await _close(events, upcoming, stop)


async def _next(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)


async def _close(events: AsyncIterator[Event], *tasks: asyncio.Future[Any]) -> None:
    # Litestar cancels this generator when the client leaves: without the shield the first await here would be
    # cancelled too, and what the stream holds would never be given back.
    with anyio.CancelScope(shield=True), anyio.move_on_after(CLEANUP_S):
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if aclose := getattr(events, "aclose", None):
            with suppress(Exception):
                await aclose()


def _message(event: Event) -> ServerSentEventMessage:
    return ServerSentEventMessage(data=_encode(event.data), event=event.name, id=event.id)


def _problem(error: Exception) -> ServerSentEventMessage:
    return ServerSentEventMessage(data=_encode(problem_of(error)), event="error")
