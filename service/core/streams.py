"""The stream of an answer, apart from the connections that read it.

Event ids are positions, not counters: a `token` event's id is the number of characters of the answer through
its end, citations and the last event follow with consecutive numbers. So a reader can take a stream up at
any id it has seen, while it runs, after it ended, and after a restart of the server: no character is lost or
comes twice, and no event needs to be kept. A reader that falls behind gets what it missed as one event.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from service.errors import ServiceError

_FIRST_READER_S = 15.0
"""How long a new answer waits for its first reader, whatever the grace time: the response is still being set
up."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """`name`: `token`, `citation`, `done` or `error`; `data`: its JSON object, for `error` the
    ServiceError."""

    id: int
    name: str
    data: Any


def closing_events(text: str, citations: Sequence[dict[str, Any]], name: str, data: Any) -> list[StreamEvent]:
    """What follows the tokens: the citations, then `done` or `error`."""
    first = len(text) + 1
    events = [StreamEvent(first + i, "citation", citation) for i, citation in enumerate(citations)]
    return [*events, StreamEvent(first + len(events), name, data)]


class AnswerStream:
    """The text of a running answer and, once it is over, its closing events. Used from the event loop only.

    While no reader is attached for `grace_s`, `on_abandoned` is called, once; again after `wait_on`.
    """

    def __init__(self, answer_id: str, session_id: str, *, grace_s: float, on_abandoned: Callable[[], None]) -> None:
        self.answer_id = answer_id
        self.session_id = session_id
        self.text = ""
        self._closing: list[StreamEvent] | None = None
        self._failure: ServiceError | None = None
        self._changed = asyncio.Event()
        self._grace_s = grace_s
        self._on_abandoned = on_abandoned
        self._readers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer(max(grace_s, _FIRST_READER_S))

    @classmethod
    def finished(cls, answer_id: str, session_id: str, text: str, closing: list[StreamEvent]) -> "AnswerStream":
        """The stream of an answer that is over, from what was stored of it."""
        stream = cls(answer_id, session_id, grace_s=0.0, on_abandoned=lambda: None)
        stream.add_text(text)
        stream.close(closing)
        return stream

    @property
    def closed(self) -> bool:
        return self._closing is not None or self._failure is not None

    @property
    def last_event(self) -> StreamEvent | None:
        """`done` or `error`, once there is one."""
        return self._closing[-1] if self._closing else None

    def add_text(self, text: str) -> None:
        if text:
            self.text += text
            self._wake()

    def close(self, closing: list[StreamEvent]) -> None:
        """End the stream with these events (see `closing_events`)."""
        self._closing = closing
        self._stop_timer()
        self._wake()

    def wait_on(self) -> None:
        """After `on_abandoned`: somebody reads it elsewhere, so that the grace time begins anew."""
        if not self._readers and not self.closed:
            self._start_timer(self._grace_s)

    def fail(self, error: ServiceError) -> None:
        """Nothing more comes here, though the answer may go on elsewhere: readers get the error, which has no place in
        the stream, so that they can take it up where they are."""
        self._failure = error
        self._stop_timer()
        self._wake()

    def is_over_after(self, event_id: int) -> bool:
        """Whether nothing will ever follow that id."""
        return self._closing is not None and event_id >= self._closing[-1].id

    @contextmanager
    def reader(self) -> Iterator[None]:
        """Count a reader for as long as the block runs; leaving never awaits, so cancellation cannot lose
        it."""
        self._readers += 1
        self._stop_timer()
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers and not self.closed:
                self._start_timer(self._grace_s)

    async def events(self, after: int = 0) -> AsyncGenerator[StreamEvent, None]:
        """Events with ids above `after`, as they come, through the last one."""
        with self.reader():
            while True:
                changed = self._changed
                if after < len(self.text):
                    text, after = self.text[after:], len(self.text)
                    yield StreamEvent(after, "token", {"text": text})
                elif self._failure is not None:
                    raise self._failure
                elif self._closing is not None:
                    for event in self._closing:
                        if event.id > after:
                            yield event
                    return
                else:
                    await changed.wait()

    async def wait_closed(self) -> StreamEvent:
        """The last event, once the answer is over. Counts as a reader while it waits."""
        with self.reader():
            while self._closing is None:
                if self._failure is not None:
                    raise self._failure
                await self._changed.wait()
            return self._closing[-1]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _start_timer(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._on_abandoned)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
