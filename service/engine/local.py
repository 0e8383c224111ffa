"""An engine in this process: for `preread ask`, for tests, and wherever a child process is too much."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from service.engine.factory import EngineConfig, open_host
from service.engine.host.host import EngineHost
from service.engine.mailbox import Mailbox
from service.engine.messages import (
    AnswerEvent,
    AnswerRequest,
    BuildEvent,
    BuildRequest,
    DocumentRef,
    EngineInfo,
    EngineStats,
    ReleaseDone,
    is_last,
)
from service.engine.protocol import EngineLost
from service.engine.scheduler.cancel import Reason
from service.engine.scheduler.errors import SchedulerClosed


class LocalEngine:
    """An `EngineClient` over an `EngineHost`, whose threads do the work. Not shared between event loops."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._mailbox: Mailbox[tuple[asyncio.Queue[Any], Any]] | None = None

    @classmethod
    async def open(cls, config: EngineConfig) -> "LocalEngine":
        """Load the model without blocking the event loop. Raises what `open_host` raises."""
        return cls(await asyncio.to_thread(open_host, config))

    @property
    def info(self) -> EngineInfo:
        return self._host.info

    @property
    def alive(self) -> bool:
        return self._host.alive

    @property
    def has_host_tier(self) -> bool:
        """Whether documents that leave the device go to host memory."""
        return self._host.has_host_tier

    def build(self, request: BuildRequest) -> AsyncIterator[BuildEvent]:
        return self._stream(request, self._host.build)

    def answer(self, request: AnswerRequest) -> AsyncIterator[AnswerEvent]:
        return self._stream(request, self._host.answer)

    async def cancel(self, request_id: str) -> None:
        self._host.cancel(request_id)

    async def release(self, document: DocumentRef) -> ReleaseDone:
        return await self._call(self._host.release, document)

    async def move_out(self, document: DocumentRef) -> bool:
        """As `EngineHost.move_out`."""
        return await self._call(self._host.move_out, document)

    async def release_session(self, session_id: str) -> None:
        await self._call(self._host.release_session, session_id)

    async def stats(self) -> EngineStats:
        return self._host.stats()

    async def check(self) -> float:
        return await self._call(self._host.check)

    async def drain(self, deadline_s: float) -> None:
        """Take no more requests and end those that are open, as `EngineHost.drain` says."""
        await asyncio.to_thread(self._host.drain, deadline_s)

    async def close(self) -> None:
        await asyncio.to_thread(self._host.close)

    async def _stream(self, request: Any, start: Callable[[Any, Callable[[Any], object]], Any]):
        events: asyncio.Queue[Any] = asyncio.Queue()
        mailbox = self._mailbox_here()
        start(request, lambda event: mailbox.post((events, event)))
        ended = False
        try:
            while not ended:
                event = await events.get()
                ended = is_last(event)
                yield event
        finally:
            if not ended:
                self._host.cancel(request.request_id, Reason.CLOSED)

    def _mailbox_here(self) -> Mailbox[tuple[asyncio.Queue[Any], Any]]:
        """That of the running loop, for the events of all requests."""
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop(), _deliver)
        return self._mailbox

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await asyncio.to_thread(function, *arguments)
        except SchedulerClosed as error:
            raise EngineLost(str(error)) from None


def _deliver(events: Sequence[tuple[asyncio.Queue[Any], Any]]) -> None:
    for queue, event in events:
        queue.put_nowait(event)
