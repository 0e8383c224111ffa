"""Telling a request that works in several threads to stop."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum


class Reason(Enum):
    """Who wants a request to stop, which decides what is kept of it."""

    ASKED = "asked"
    """The client cancelled it: an answer keeps what it has, a build is given up."""
    CLOSED = "closed"
    """Nobody reads its events any more: an answer is dropped, a build's journal is kept."""
    RELEASED = "released"
    """Its document is being deleted: nothing is kept."""
    DRAIN = "drain"
    """The engine shuts down: answers keep what they have, journals are kept."""


class Cancelled(Exception):
    """The request was cancelled."""


class CancelToken:
    """Set once; wakes whatever waits on the request's behalf."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self.reason: Reason | None = None

    @property
    def cancelled(self) -> bool:
        return self.reason is not None

    def cancel(self, reason: Reason) -> None:
        """Cancel, once; later reasons are ignored, but that RELEASED overrides others."""
        with self._lock:
            if self.reason is None or reason is Reason.RELEASED:
                self.reason = reason
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback()

    def check(self) -> None:
        """Raises Cancelled."""
        if self.cancelled:
            raise Cancelled("the request was cancelled")

    @contextmanager
    def calling(self, callback: Callable[[], object]) -> Iterator[None]:
        """Have `callback` called on cancel, at once if that has happened; it may come from any thread."""
        with self._lock:
            self._callbacks.append(callback)
        try:
            if self.cancelled:
                callback()
            yield
        finally:
            with self._lock:
                self._callbacks.remove(callback)
