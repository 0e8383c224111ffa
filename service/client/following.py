"""Streams of events that are taken up again where they were lost, whoever reads them."""

import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import httpx
import msgspec

from service.client.attempts import Attempts, Patience, backoff_s
from service.client.calls import Call
from service.client.errors import (
    APIError,
    ConnectionFailed,
    Problem,
    TimedOut,
    UnexpectedResponse,
    error_of,
    failed_connection,
)
from service.client.sse import ServerEvent

E = TypeVar("E")
_COME_BACK = frozenset({408, 425, 429})


class Following(ABC, Generic[E]):
    """Where a reader is in a stream. A client opens `call()` again and again, as often as the methods give it seconds
    to wait before, until `is_over`."""

    def __init__(
        self, first: Call, patience: Patience, url: str, *, last_event_id: str = "", timeout_s: float | None = None
    ) -> None:
        self.is_over = False
        self.last_event_id = last_event_id
        self._first = first
        self._url = url
        self._patience = patience
        self._attempts = Attempts(first, patience, url)
        self._is_open = False
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._lost_at: float | None = None
        self._n_lost = 0

    def call(self) -> Call:
        """What to open now."""
        return self._again() if self._is_open else self._first

    def opened(self, response: httpx.Response) -> None:
        """The server answered."""
        self._is_open = True
        self.is_over = response.status_code == 204

    def heard(self, event: ServerEvent) -> E | None:
        """What an event tells the reader. Raises APIError, UnexpectedResponse, TimedOut."""
        if event.id:
            self.last_event_id = event.id
        if event.name == "error":
            self.is_over = bool(event.id)  # one without is of the connection, not of the answer
            raise error_of(decoded(event.data, Problem))
        self._lost_at, self._n_lost = None, 0
        told = None if event.name == "comment" else self._told(event)
        self._check_time()
        return told

    def broken(self, error: httpx.TransportError | None) -> float:
        """The connection was not made, was lost, or (None) ended early. Raises ConnectionFailed."""
        if not self._is_open and error is not None:
            return self._attempts.after_loss(error)
        failed = failed_connection(error, self._url) if error else ConnectionFailed(f"{self._url} ended the stream.")
        return self._wait_s(failed)

    def refused(self, error: APIError) -> float:
        """The server refused, or told an error. Raises it when trying again would not help."""
        if self.is_over:
            raise error
        if not self._is_open:
            return self._attempts.after_refusal(error)
        if error.status < 500 and error.status not in _COME_BACK:
            raise error
        return max(self._wait_s(error), min(error.retry_after_s or 0.0, self._patience.longest_retry_after_s))

    @abstractmethod
    def _again(self) -> Call:
        """Opens the stream behind `last_event_id`."""

    @abstractmethod
    def _told(self, event: ServerEvent) -> E | None:
        """What an event tells; sets `is_over` with the last one."""

    def _given_up(self, error: Exception) -> Exception:
        return error

    def _wait_s(self, error: Exception) -> float:
        self._check_time()
        now = time.monotonic()
        self._lost_at = now if self._lost_at is None else self._lost_at
        if now - self._lost_at > self._patience.resume_s:
            raise self._given_up(error) from error
        self._n_lost += 1
        return backoff_s(self._n_lost)

    def _check_time(self) -> None:
        if self._ends_at is not None and not self.is_over and time.monotonic() > self._ends_at:
            raise TimedOut("It took longer than you wanted to wait. It goes on at the server.")


def decoded(data: bytes, kind: type[E]) -> E:
    """A body as it should be. Raises UnexpectedResponse."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise UnexpectedResponse(f"The server sent something that this client does not know: {error}.") from error
