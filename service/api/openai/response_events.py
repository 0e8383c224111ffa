"""The events of a response's stream, in their order, numbered from 0."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from service.api.openai.asking import Asking
from service.api.openai.errors import told
from service.api.openai.ids import message_id
from service.api.openai.response_wire import Outcome, message_item, response_object, status_of, text_part
from service.api.openai.results import annotations, extension
from service.api.openai.streaming import Piece
from service.api.schemas.questions import AnswerBody
from service.core.streams import AnswerStream
from service.errors import ServiceError

Names = Callable[[AnswerBody], Awaitable[Mapping[str, str]]]
"""Names of the files that an answer cites."""


def error_of(error: ServiceError) -> dict[str, str]:
    """As a response has it: of its codes, two are for what can happen here."""
    said = told(error, "/v1/responses").error
    return {"code": said.code if said.code == "rate_limit_exceeded" else "server_error", "message": said.message}


class _Events:
    """Numbers events and gives them what all of them have."""

    def __init__(self, stream: AnswerStream, created: int, shown: Mapping[str, Any]) -> None:
        self._stream = stream
        self._created = created
        self._shown = shown
        self._n = 0
        self._place = {"item_id": message_id(stream.answer_id), "output_index": 0, "content_index": 0}

    def whole(self, name: str, outcome: Outcome) -> Piece:
        """An event with the whole response."""
        return self._piece(name, response=response_object(self._stream.answer_id, self._created, self._shown, outcome))

    def item(self, name: str, outcome: Outcome) -> Piece:
        return self._piece(name, output_index=0, item=message_item(self._stream.answer_id, outcome))

    def part(self, name: str, **members: Any) -> Piece:
        """An event about the text."""
        return self._piece(name, **self._place, **members)

    def _piece(self, name: str, **members: Any) -> Piece:
        self._n += 1
        return Piece({"type": name, "sequence_number": self._n - 1, **members}, name)


async def response_events(
    asking: Asking,
    created: int,
    shown: Mapping[str, Any],
    begun: Callable[[AnswerStream], Awaitable[None]],
    names: Names,
) -> AsyncIterator[Piece]:
    """`begun` is awaited before the first event. Raises what keeps an answer from beginning."""
    stream = await asking.ask()
    await begun(stream)
    events = _Events(stream, created, shown)
    running = Outcome("in_progress")
    yield events.whole("response.created", running)
    yield events.whole("response.in_progress", running)
    yield events.item("response.output_item.added", running)
    yield events.part("response.content_part.added", part=text_part(running))
    async with aclosing(stream.events()) as pieces:
        async for piece in pieces:
            if isinstance(piece.data, ServiceError):
                yield events.whole("response.failed", Outcome("failed", error=error_of(piece.data)))
            elif piece.name == "token":
                yield events.part("response.output_text.delta", delta=piece.data["text"], logprobs=[])
            elif piece.name == "done":
                answer = msgspec.convert(piece.data, AnswerBody)
                outcome = Outcome(status_of(answer), answer.answer, answer, None, extension(answer, stream.session_id))
                for event in _ending(events, msgspec.structs.replace(outcome, names=await names(answer))):
                    yield event


def _ending(events: _Events, outcome: Outcome) -> list[Piece]:
    assert outcome.answer is not None
    cited = annotations(outcome.answer, outcome.names)
    last = "response.incomplete" if outcome.status == "incomplete" else "response.completed"
    return [
        *(
            events.part("response.output_text.annotation.added", annotation=each, annotation_index=n)
            for n, each in enumerate(cited)
        ),
        events.part("response.output_text.done", text=outcome.text, logprobs=[]),
        events.part("response.content_part.done", part=text_part(outcome)),
        events.item("response.output_item.done", outcome),
        events.whole(last, outcome),
    ]
