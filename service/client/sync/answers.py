"""The stream of an answer."""

from collections.abc import Iterator
from typing import Any

from service.client.models import Answer, Event
from service.client.streams import AnswerFollowing, whole
from service.client.sync.transport import Transport


class AnswerStream(Iterator[Event]):
    """Tokens, citations, then `Done`; a lost connection is taken up again where it was. Leaving the `with` block before
    the end closes it: the server ends an answer without readers after a while.

    Iterating raises PrereadError: StreamLost when the server was away for too long.
    """

    def __init__(self, transport: Transport, following: AnswerFollowing) -> None:
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

    def answer(self) -> Answer:
        """Read to the end; the whole answer."""
        for _ in self:
            pass
        return whole(self._following)

    def close(self) -> None:
        self._events.close()

    def __next__(self) -> Event:
        return next(self._events)

    def __enter__(self) -> "AnswerStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
