"""A bounded number of calls that another thread has yet to do."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any


class Window:
    """Takes the results of futures in order, waiting for the oldest when more than `size` are open."""

    def __init__(self, size: int, take: Callable[[Any], None] = lambda _: None) -> None:
        self._size = size
        self._take = take
        self._futures: deque[Future[Any]] = deque()

    def add(self, future: "Future[Any]") -> None:
        self._futures.append(future)
        while len(self._futures) > self._size:
            self._take(self._futures.popleft().result())

    def finish(self) -> None:
        """Take all that are left."""
        while self._futures:
            self._take(self._futures.popleft().result())

    def close(self) -> None:
        """Wait for what is left, whatever comes of it."""
        wait(self._futures)
