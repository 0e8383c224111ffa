"""Server-sent events: ids, a comment on quiet streams, and a clean end whoever leaves first."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Protocol

import anyio
import msgspec
import structlog
from litestar.response import ServerSentEvent

from service.api.problems import told_in_stream
from service.errors import ServiceError, Unavailable

CLEANUP_S = 5.0
MOST_AHEAD = 4
_encode = msgspec.json.Encoder().encode
_log = structlog.get_logger("preread.api")


class Permitted(Protocol):
    """`require` is awaited before every event, and raises ServiceError when it may not be sent."""

    async def require(self) -> None: ...


class Event(Protocol):
    """One event: its name, a JSON-able body, and the id a client sends back as `Last-Event-ID`."""

    @property
    def id(self) -> int | str: ...
    @property
    def name(self) -> str: ...
    @property
    def data(self) -> Any: ...


class Form(Protocol):
    """How events are written."""

    def event(self, event: Event) -> bytes: ...
    def problem(self, error: Exception) -> bytes: ...


class _Named:
    """With a name and an id, as all our own streams are."""

    def event(self, event: Event) -> bytes:
        return _chunk(event.name, event.data, event.id)

    def problem(self, error: Exception) -> bytes:
        return _problem(error)


def event_stream(
    events: AsyncIterator[Event],
    *,
    heartbeat_s: float,
    stopping: asyncio.Event | None = None,
    permit: Permitted | None = None,
    form: Form | None = None,
) -> ServerSentEvent:
    """Send `events` as they come. The iterator is closed in every case: at its end, on an error (told as an
    `error` event with the problem as body), when the client leaves, when `stopping` is set, and when it is not
    permitted any more."""
    response = ServerSentEvent(())
    # Litestar's own iterator takes a thread to begin, and splits every event into lines once more.
    response.iterator = _chunks(events, heartbeat_s, stopping or asyncio.Event(), permit, form or _Named())
    return response


class _Feed:
    """Runs an iterator in one task, a few events ahead. A task and two timers for each event would cost more than
    everything else that is done for it."""

    def __init__(self, events: AsyncIterator[Event], stopping: asyncio.Event) -> None:
        self._events = events
        self._ready: deque[Event] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._pump = asyncio.ensure_future(self._run())
        self._stop = asyncio.ensure_future(stopping.wait())
        for each in (self._pump, self._stop):
            each.add_done_callback(self._wake)

    @property
    def stopped(self) -> bool:
        return self._stop.done()

    async def next(self, timeout_s: float) -> Event | None:
        """The next event; None when there is none for so long, at the end, and when the server stops. Raises what the
        iterator raised."""
        if not self._ready and not self._pump.done() and not self.stopped:
            await self._wait(timeout_s)
        if self._ready:
            self._room.set()
            return self._ready.popleft()
        if self._pump.done():
            self._pump.result()
        return None

    @property
    def ended(self) -> bool:
        return self._pump.done() and not self._ready

    async def close(self) -> None:
        # Litestar cancels the generator when the client leaves: without the shield the first await here would be
        # cancelled too, and what the stream holds would never be given back.
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLEANUP_S):
            for task in (self._pump, self._stop):
                task.cancel()
            await asyncio.gather(self._pump, self._stop, return_exceptions=True)
            if aclose := getattr(self._events, "aclose", None):
                with suppress(Exception):
                    await aclose()

    async def _run(self) -> None:
        async for event in self._events:
            self._ready.append(event)
            self._wake()
            # A slow reader's events are better left to the stream, which joins them.
            while len(self._ready) >= MOST_AHEAD:
                self._room.clear()
                await self._room.wait()

    async def _wait(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        timer = loop.call_later(timeout_s, self._wake)
        try:
            await self._waiting
        finally:
            timer.cancel()

    def _wake(self, _: object = None) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


async def _chunks(
    events: AsyncIterator[Event], heartbeat_s: float, stopping: asyncio.Event, permit: Permitted | None, form: Form
) -> AsyncIterator[bytes]:
    feed = _Feed(events, stopping)
    try:
        while True:
            if (event := await feed.next(heartbeat_s)) is not None:
                if permit is not None:
                    await permit.require()
                yield form.event(event)
            elif feed.ended:
                return
            elif feed.stopped:
                yield form.problem(Unavailable("The server is shutting down: take the stream up again."))
                return
            else:
                yield b": still here\r\n\r\n"
    except Exception as error:
        if not isinstance(error, ServiceError):
            _log.error("stream failed", error=type(error).__name__, exc_info=error)
        yield form.problem(error)
    finally:
        await feed.close()


def _chunk(name: str, data: Any, id: int | str | None = None) -> bytes:
    """An event as it is sent; JSON has no line breaks of its own."""
    head = f"event: {name}\r\ndata: " if id is None else f"id: {id}\r\nevent: {name}\r\ndata: "
    return head.encode() + _encode(data) + b"\r\n\r\n"


def _problem(error: Exception) -> bytes:
    return _chunk("error", told_in_stream(error))
