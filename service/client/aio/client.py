"""`AsyncClient`."""

from collections.abc import Mapping
from ssl import SSLContext
from typing import Unpack

import httpx

from service.client import calls
from service.client.aio.answers import AsyncAnswerStream
from service.client.aio.documents import AsyncDocuments
from service.client.aio.sessions import AsyncSessions
from service.client.aio.transport import AsyncTransport
from service.client.attempts import Patience
from service.client.connection import DEFAULT_TIMEOUT, Connection
from service.client.errors import Unavailable
from service.client.models import Answer
from service.client.streams import AnswerFollowing


class AsyncClient:
    """Asks a Preread server. Each event loop has one of its own; use it with `async with`, or `close` it.

    `key` is an API key or the token of a link; a server without keys needs none. `timeout` is the longest silence of
    the server, in seconds. `retries` is how often a call is sent again where that is safe; `resume_s` how long a lost
    stream is taken up again without any news. Raises ValueError for an address or a key that cannot be one.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        timeout: float | httpx.Timeout = DEFAULT_TIMEOUT,
        retries: int = 3,
        resume_s: float = 120.0,
        verify: bool | SSLContext = True,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        patience = Patience(retries=retries, resume_s=resume_s)
        self._transport = AsyncTransport(Connection(url, key, timeout, patience, verify, headers or {}, transport))
        self.documents = AsyncDocuments(self._transport)
        self.sessions = AsyncSessions(self._transport)

    async def ask(
        self,
        session_id: str,
        question: str,
        *,
        idempotency_key: str | None = None,
        **sampling: Unpack[calls.Sampling],
    ) -> Answer:
        """The whole answer. Raises PrereadError: Conflict while the session answers another question, RateLimited,
        Invalid, and as iterating `stream`."""
        async with self.stream(session_id, question, idempotency_key=idempotency_key, **sampling) as events:
            return await events.answer()

    def stream(
        self,
        session_id: str,
        question: str,
        *,
        idempotency_key: str | None = None,
        **sampling: Unpack[calls.Sampling],
    ) -> AsyncAnswerStream:
        """The answer as it is made. It is asked when the first event is read, and once, however often it is sent."""
        first = calls.ask(session_id, question, sampling, idempotency_key)
        return AsyncAnswerStream(
            self._transport, AnswerFollowing(first, session_id, self._transport.patience, self._transport.url)
        )

    def follow(self, session_id: str, answer_id: str, last_event_id: str = "") -> AsyncAnswerStream:
        """Take up the stream of an answer behind an event, while it runs or any time later."""
        following = AnswerFollowing(
            calls.answer_events(session_id, answer_id, last_event_id), session_id, self._transport.patience,
            self._transport.url, answer_id=answer_id, last_event_id=last_event_id,
        )  # fmt: skip
        return AsyncAnswerStream(self._transport, following)

    async def is_ready(self) -> bool:
        """Whether a question would be answered now. Raises ConnectionFailed."""
        try:
            await self.check_ready()
        except Unavailable:
            return False
        return True

    async def check_ready(self) -> None:
        """Raises Unavailable, which says what is missing, ConnectionFailed."""
        await self._transport.send_once(calls.ready())

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
