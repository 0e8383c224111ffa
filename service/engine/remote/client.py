"""The service's end of an engine process's socket. Knows nothing about processes; imports no torch."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from service.engine.messages import (
    PROTOCOL_VERSION,
    AnswerEvent,
    AnswerRequest,
    BuildEvent,
    BuildRequest,
    DocumentRef,
    EngineInfo,
    EngineStats,
    Failed,
    ReleaseDone,
    is_last,
)
from service.engine.protocol import EngineLost
from service.engine.remote import wire

LOST = Failed("engine_lost", "the engine process ended or closed its connection", retryable=True)
REPLY_TIMEOUT_S = 30.0


class RemoteEngine:
    """An `EngineClient` over one connection. When it breaks, open iterators end with `engine_lost` and calls
    raise EngineLost; a new connection is a new RemoteEngine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, info: EngineInfo) -> None:
        self._reader = reader
        self._writer = writer
        self._info = info
        self._numbers = itertools.count()
        self._streams: dict[int, asyncio.Queue[Any]] = {}
        self._replies: dict[int, asyncio.Future[wire.Reply]] = {}
        self._alive = True
        self.n_heard = 0
        """Messages of the process: whatever it says, it lives."""
        self._receiver = asyncio.create_task(self._receive())

    @classmethod
    async def connect(cls, path: str) -> "RemoteEngine":
        """Connect to a Unix socket and read the greeting. Raises EngineLost, also for another version."""
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError as error:
            raise EngineLost(f"the engine cannot be reached: {error}") from error
        try:
            return cls(reader, writer, await _greeting(reader))
        except BaseException:
            await _closed(writer)
            raise

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def alive(self) -> bool:
        return self._alive

    def build(self, request: BuildRequest) -> AsyncIterator[BuildEvent]:
        return self._stream(request.request_id, lambda call: wire.Build(call, request))

    def answer(self, request: AnswerRequest) -> AsyncIterator[AnswerEvent]:
        return self._stream(request.request_id, lambda call: wire.Answer(call, request))

    async def cancel(self, request_id: str) -> None:
        self._send(wire.Cancel(request_id, closed=False))

    async def release(self, document: DocumentRef) -> ReleaseDone:
        reply = await self._ask(lambda call: wire.Release(call, document))
        return reply.released or ReleaseDone(0, 0)

    async def release_session(self, session_id: str) -> None:
        await self._ask(lambda call: wire.ReleaseSession(call, session_id))

    async def stats(self) -> EngineStats:
        reply = await self._ask(wire.Stats)
        if reply.stats is None:
            raise EngineLost("the engine gave no figures")
        return reply.stats

    async def check(self) -> float:
        return (await self._ask(wire.Check)).milliseconds

    def ping(self) -> None:
        """Have the process say something, soon."""
        self._send(wire.Ping(next(self._numbers)))

    async def drained(self, timeout_s: float) -> None:
        """Wait until everything was read that an ending process has sent."""
        await asyncio.wait((self._receiver,), timeout=timeout_s)

    async def close(self) -> None:
        self._lose()
        self._receiver.cancel()
        await asyncio.wait((self._receiver,))
        await _closed(self._writer)

    async def _stream(self, request_id: str, message: Any):
        if not self._alive:
            yield LOST
            return
        call, events, ended = next(self._numbers), asyncio.Queue(), False
        self._streams[call] = events
        try:
            self._send(message(call))
            while not ended:
                event = await events.get()
                ended = is_last(event)
                yield event
        finally:
            del self._streams[call]
            if not ended:
                self._send(wire.Cancel(request_id, closed=True))

    async def _ask(self, message: Any) -> wire.Reply:
        if not self._alive:
            raise EngineLost(LOST.detail)
        call = next(self._numbers)
        reply = self._replies[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(message(call))
            answer = await asyncio.wait_for(reply, REPLY_TIMEOUT_S)
        except TimeoutError:
            raise EngineLost(f"the engine did not answer in {REPLY_TIMEOUT_S:.0f} s") from None
        finally:
            del self._replies[call]
        if answer.error is not None:
            raise EngineLost(answer.error)
        return answer

    def _send(self, message: wire.ToServer) -> None:
        if self._alive:
            self._writer.write(wire.frame(message))

    async def _receive(self) -> None:
        try:
            while (message := await wire.read_frame(self._reader, wire.from_server)) is not None:
                self._dispatch(message)
        except (OSError, wire.FrameRefused):
            pass
        finally:
            self._lose()

    def _dispatch(self, message: wire.FromServer) -> None:
        self.n_heard += 1
        if isinstance(message, wire.Event):
            if events := self._streams.get(message.call):
                events.put_nowait(message.event)
        elif isinstance(message, wire.Reply):
            reply = self._replies.get(message.call)
            if reply is not None and not reply.done():
                reply.set_result(message)

    def _lose(self) -> None:
        self._alive = False
        for events in self._streams.values():
            events.put_nowait(LOST)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineLost(LOST.detail))


async def _greeting(reader: asyncio.StreamReader) -> EngineInfo:
    try:
        hello = await asyncio.wait_for(wire.read_frame(reader, wire.from_server), REPLY_TIMEOUT_S)
    except (OSError, TimeoutError, wire.FrameRefused) as error:
        raise EngineLost(f"the engine did not greet: {error}") from error
    if not isinstance(hello, wire.Hello) or hello.version != PROTOCOL_VERSION:
        raise EngineLost(f"the engine does not speak version {PROTOCOL_VERSION} of the protocol")
    return hello.info


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
