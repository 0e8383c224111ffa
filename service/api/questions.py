"""`/v1/sessions/{id}/questions`."""

from litestar import Controller, Request, Response, get, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody
from litestar.response import ServerSentEvent

from service.api.answer_events import answer_events, position_after, whole_answer
from service.api.described import NOTHING_FOLLOWS, AnswerOperation, EventsOperation, LastEventId
from service.api.principal import FOR_ASKING
from service.api.problems import problem_responses
from service.api.schemas.questions import AnswerBody, QuestionBody
from service.api.schemas.repeats import IdempotencyKey
from service.api.sse import event_stream
from service.core.keys import Principal
from service.core.permits import Permit
from service.core.services import Services
from service.core.streams import AnswerStream


class QuestionController(Controller):
    """Questions of a session, and their answers."""

    path = "/v1/sessions/{session_id:str}/questions"
    tags = ("questions",)

    @post(
        status_code=200,
        opt=FOR_ASKING,
        operation_class=AnswerOperation,
        responses={
            200: ResponseSpec(
                AnswerBody, generate_examples=False, description="The answer; with `stream`, an event stream instead."
            ),
            **problem_responses(404, 409, 422, 429, 503, 507),
        },
    )
    async def ask(
        self,
        request: Request,
        services: NamedDependency[Services],
        principal: NamedDependency[Principal],
        session_id: FromPath[str],
        data: JSONBody[QuestionBody],
        idempotency_key: IdempotencyKey = None,
    ) -> Response[AnswerBody | None] | ServerSentEvent:
        """Ask a question. `Location` names the answer's events, for taking them up again."""
        stream = await services.conversations.answers.ask(
            principal.user_id, session_id, data.to_question(), repeat_key=idempotency_key
        )
        permit = await services.permits.of_session(principal, session_id)
        location = {"Location": f"/v1/sessions/{session_id}/questions/{stream.answer_id}/events"}
        if data.stream:
            response = _event_stream(services, stream, 0, permit)
            response.headers.update(location)
            return response
        answer = await whole_answer(request, stream, services.stopping)
        if permit is not None:
            await permit.require()
        return Response(answer, headers=location)

    @get(
        "/{answer_id:str}/events",
        media_type="text/event-stream",
        operation_class=EventsOperation,
        responses=NOTHING_FOLLOWS | problem_responses(404),
    )
    async def events(
        self,
        services: NamedDependency[Services],
        principal: NamedDependency[Principal],
        session_id: FromPath[str],
        answer_id: FromPath[str],
        last_event_id: LastEventId = None,
    ) -> ServerSentEvent | Response[None]:
        """The stream of an answer after `Last-Event-ID`, while it runs or later; 204 when nothing follows."""
        stream = await services.conversations.answers.stream(principal.user_id, session_id, answer_id)
        after = position_after(last_event_id)
        if stream.is_over_after(after):
            return Response(None, status_code=204)
        permit = await services.permits.of_session(principal, session_id)
        return _event_stream(services, stream, after, permit)


def _event_stream(services: Services, stream: AnswerStream, after: int, permit: Permit | None) -> ServerSentEvent:
    return event_stream(
        answer_events(stream, after),
        heartbeat_s=services.settings.sse_heartbeat_s,
        stopping=services.stopping,
        permit=permit,
    )
