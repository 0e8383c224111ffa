"""`/v1/responses`."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from litestar import Controller, Request, Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, QueryParameter
from litestar.response import ServerSentEvent

from service.api.openai import wire
from service.api.openai.asking import MAX_BODY_BYTES, Asking
from service.api.openai.errors import on_openai_error, openai_responses
from service.api.openai.ids import answer_id
from service.api.openai.models import require_model
from service.api.openai.response_events import error_of, response_events
from service.api.openai.response_wire import REFUSED, Outcome, ResponseRequest, response_object, said_of, status_of
from service.api.openai.results import extension
from service.api.openai.streaming import LatePermit, ResponseForm
from service.api.principal import FOR_ASKING
from service.api.schemas.questions import AnswerBody, answer_body
from service.api.schemas.repeats import IdempotencyKey
from service.api.sse import event_stream
from service.core.answer_run import error_of as stored_error
from service.core.keys import Principal
from service.core.services import Services
from service.core.streams import AnswerStream
from service.db.models import TurnRow
from service.errors import Invalid, NotFound


class ResponseDeleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["response"] = "response"


class ResponseController(Controller):
    """Each follows its input, or another response."""

    path = "/v1/responses"
    tags = ("openai",)
    exception_handlers = {Exception: on_openai_error}  # noqa: RUF012 - Litestar reads this class attribute

    @post(
        status_code=200,
        opt=FOR_ASKING,
        request_max_body_size=MAX_BODY_BYTES,
        responses=openai_responses(409, 413, 507),
    )
    async def create(
        self,
        request: Request,
        services: NamedDependency[Services],
        principal: NamedDependency[Principal],
        data: JSONBody[ResponseRequest],
        idempotency_key: IdempotencyKey = None,
    ) -> Response[dict[str, Any] | None] | ServerSentEvent:
        """Answer the input. With `stream`, an event stream instead."""
        require_model(services, data.model)
        wire.refuse_unsupported(data, REFUSED)
        asking = Asking(request, services, principal)
        previous = answer_id(data.previous_response_id) if data.previous_response_id else None
        documents, said = wire.documents_of(data.metadata), said_of(data)
        await asking.open(
            said, data.question(), documents=documents, previous=previous, repeat_key=idempotency_key, body=data
        )
        work = _Work(services, principal.user_id, data)
        if data.stream:
            return event_stream(
                response_events(asking, work.created, work.shown, work.begun, work.names),
                heartbeat_s=services.settings.sse_heartbeat_s,
                stopping=services.stopping,
                permit=LatePermit(asking),
                form=ResponseForm(),
            )
        answer = await asking.whole()
        if answer is None or asking.stream is None:
            return Response(None)
        await work.begun(asking.stream)
        return Response(await work.response(answer, asking.stream))

    @get("/{response_id:str}", responses=openai_responses())
    async def detail(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        response_id: FromPath[str],
        stream: Annotated[bool, QueryParameter(description="Not supported.")] = False,
    ) -> dict[str, Any]:
        """A stored response, as it is now."""
        row, turn = await services.chats.responses.get(owner_id, answer_id(response_id))
        if stream:
            raise Invalid(
                "A stored response is not streamed: retrieve it whole.", code="unsupported_parameter", param="stream"
            )
        outcome = await _outcome(services, owner_id, row.session_id, turn)
        return response_object(row.id, int(row.created_at), row.request, outcome)

    @delete("/{response_id:str}", status_code=200, opt=FOR_ASKING, responses=openai_responses(507))
    async def remove(
        self, services: NamedDependency[Services], owner_id: NamedDependency[str], response_id: FromPath[str]
    ) -> ResponseDeleted:
        """Remove a response; with the last one of a conversation, the conversation."""
        await services.chats.responses.delete(owner_id, answer_id(response_id))
        return ResponseDeleted(response_id)


class _Work:
    """What is done for a request beside its answer."""

    def __init__(self, services: Services, owner_id: str, request: ResponseRequest) -> None:
        self._services = services
        self._owner_id = owner_id
        self._is_stored = request.is_stored
        self.shown = request.shown()
        self.created = int(services.clock.now())

    async def begun(self, stream: AnswerStream) -> None:
        """Store the response, unless that is not wanted."""
        if self._is_stored:
            await self._services.chats.responses.keep(self._owner_id, stream, self.shown)

    async def names(self, answer: AnswerBody) -> Mapping[str, str]:
        return await _names(self._services, self._owner_id, answer)

    async def response(self, answer: AnswerBody, stream: AnswerStream) -> dict[str, Any]:
        more = extension(answer, stream.session_id)
        outcome = Outcome(status_of(answer), answer.answer, answer, None, more, await self.names(answer))
        return response_object(answer.id, self.created, self.shown, outcome)


async def _outcome(services: Services, owner_id: str, session_id: str, turn: TurnRow) -> Outcome:
    if turn.status == "running":
        return Outcome("in_progress")
    if turn.status == "failed":
        return Outcome("failed", error=error_of(stored_error(turn.error_code or "error", turn.error_detail or "")))
    answer = answer_body(turn)
    more = extension(answer, session_id)
    return Outcome(status_of(answer), answer.answer, answer, None, more, await _names(services, owner_id, answer))


async def _names(services: Services, owner_id: str, answer: AnswerBody) -> Mapping[str, str]:
    """Names of the files that an answer cites, by the ids of the documents."""
    names: dict[str, str] = {}
    for document_id in {each.document_id for each in answer.citations}:
        with suppress(NotFound):
            names[document_id] = (await services.documents.get(owner_id, document_id)).row.filename
    return names
