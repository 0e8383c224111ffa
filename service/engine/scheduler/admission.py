"""First come, first served access to a fixed number of places in the batch."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from service.engine.scheduler.cancel import CancelToken


class FifoGate:
    """At most `n_places` are inside; others wait in order of arrival."""

    def __init__(self, n_places: int) -> None:
        self._n_places = n_places
        self._changed = threading.Condition()
        self._line: deque[object] = deque()
        self._n_inside = 0

    @property
    def n_waiting(self) -> int:
        return len(self._line)

    @property
    def n_inside(self) -> int:
        return self._n_inside

    @contextmanager
    def admitted(self, cancel: CancelToken) -> Iterator[None]:
        """Wait for a place and hold it. Raises Cancelled when cancelled while waiting."""
        self._enter(cancel)
        try:
            yield
        finally:
            with self._changed:
                self._n_inside -= 1
                self._changed.notify_all()

    def _enter(self, cancel: CancelToken) -> None:
        ticket = object()
        with self._changed:
            self._line.append(ticket)
        try:
            with cancel.calling(self._notify), self._changed:
                while self._line[0] is not ticket or self._n_inside >= self._n_places:
                    cancel.check()
                    self._changed.wait()
                cancel.check()
                self._n_inside += 1
        finally:
            with self._changed:
                self._line.remove(ticket)
                self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
