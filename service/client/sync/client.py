"""`Client`."""

from collections.abc import Mapping
from ssl import SSLContext
from typing import Unpack

import httpx

from service.client import calls
from service.client.attempts import Patience
from service.client.connection import DEFAULT_TIMEOUT, Connection
from service.client.errors import Unavailable
from service.client.models import Answer
from service.client.streams import AnswerFollowing
from service.client.sync.answers import AnswerStream
from service.client.sync.documents import Documents
from service.client.sync.sessions import Sessions
from service.client.sync.transport import Transport


class Client:
    """Asks a Preread server. Threads may share one; use it as a context manager, or `close` it.

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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        patience = Patience(retries=retries, resume_s=resume_s)
        self._transport = Transport(Connection(url, key, timeout, patience, verify, headers or {}, transport))
        self.documents = Documents(self._transport)
        self.sessions = Sessions(self._transport)

    def ask(
        self,
        session_id: str,
        question: str,
        *,
        idempotency_key: str | None = None,
        **sampling: Unpack[calls.Sampling],
    ) -> Answer:
        """The whole answer. Raises PrereadError: Conflict while the session answers another question, RateLimited,
        Invalid, and as iterating `stream`."""
        with self.stream(session_id, question, idempotency_key=idempotency_key, **sampling) as events:
            return events.answer()

    def stream(
        self,
        session_id: str,
        question: str,
        *,
        idempotency_key: str | None = None,
        **sampling: Unpack[calls.Sampling],
    ) -> AnswerStream:
        """The answer as it is made. It is asked when the first event is read, and once, however often it is sent."""
        first = calls.ask(session_id, question, sampling, idempotency_key)
        return AnswerStream(
            self._transport, AnswerFollowing(first, session_id, self._transport.patience, self._transport.url)
        )

    def follow(self, session_id: str, answer_id: str, last_event_id: str = "") -> AnswerStream:
        """Take up the stream of an answer behind an event, while it runs or any time later."""
        following = AnswerFollowing(
            calls.answer_events(session_id, answer_id, last_event_id), session_id, self._transport.patience,
            self._transport.url, answer_id=answer_id, last_event_id=last_event_id,
        )  # fmt: skip
        return AnswerStream(self._transport, following)

    def is_ready(self) -> bool:
        """Whether a question would be answered now. Raises ConnectionFailed."""
        try:
            self.check_ready()
        except Unavailable:
            return False
        return True

    def check_ready(self) -> None:
        """Raises Unavailable, which says what is missing, ConnectionFailed."""
        self._transport.send_once(calls.ready())

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
