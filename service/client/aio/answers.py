"""The stream of an answer."""

from collections.abc import AsyncIterator
from typing import Any

from service.client.aio.transport import AsyncTransport
from service.client.models import Answer, Event
from service.client.streams import AnswerFollowing, whole


class AsyncAnswerStream(AsyncIterator[Event]):
    """Tokens, citations, then `Done`; a lost connection is taken up again where it was. Leaving the `async with`
    block before the end closes it: the server ends an answer without readers after a while.

    Iterating raises PrereadError: StreamLost when the server was away for too long.
    """

    def __init__(self, transport: AsyncTransport, following: AnswerFollowing) -> None:
        self._following = following
        self._events: Any = transport.follow(following)

    @property
    def answer_id(self) -> str:
        """Empty before the first event."""
        return self._following.answer_id

    @property
    def last_event_id(self) -> str:
        """Where `client.follow` would go on."""
        return self._following.last_event_id

    @property
    def text(self) -> str:
        """What has come of the answer."""
        return self._following.text

    async def answer(self) -> Answer:
        """Read to the end; the whole answer."""
        async for _ in self:
            pass
        return whole(self._following)

    async def close(self) -> None:
        await self._events.aclose()

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def __aenter__(self) -> "AsyncAnswerStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
