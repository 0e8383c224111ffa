"""From other threads to an event loop, with few wake-ups.

To wake a loop is to write to a socket, and to give up the interpreter's lock to the loop's thread: done for each token
of each answer of a step, it keeps the engine's thread from its next step.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Held(threading.local):
    boxes: "set[Mailbox[Any]] | None" = None


_held = _Held()


@contextmanager
def one_wake() -> Iterator[None]:
    """What this thread posts meanwhile is handed over at the end, with one wake-up of each loop. A loop that was closed
    since then has nobody who reads; others are woken all the same."""
    if _held.boxes is not None:
        yield
        return
    boxes = _held.boxes = set()
    try:
        yield
    finally:
        _held.boxes = None
        for box in boxes:
            with suppress(RuntimeError):
                box.wake()


class Mailbox(Generic[T]):
    """Hands what is posted to `deliver`, in order, on the loop; all that is there at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[T]], object]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._items: deque[T] = deque()
        self._is_woken = False

    def post(self, item: T) -> None:
        """From any thread. Raises RuntimeError when the loop is closed."""
        if self._loop.is_closed():
            raise RuntimeError("the event loop that should be told is closed")
        self._items.append(item)
        if _held.boxes is None:
            self.wake()
        else:
            _held.boxes.add(self)

    def wake(self) -> None:
        """See that the loop takes what is there. Raises RuntimeError when it is closed."""
        if self._is_woken:
            return  # it has not begun to take items, and will find these
        self._is_woken = True
        try:
            self._loop.call_soon_threadsafe(self._empty)
        except RuntimeError:
            self._is_woken = False
            raise

    def _empty(self) -> None:
        self._is_woken = False  # first: what is posted from now on wakes the loop again
        items = []
        while self._items:
            items.append(self._items.popleft())
        if items:
            self._deliver(items)
