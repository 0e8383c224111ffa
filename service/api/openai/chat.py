"""`/v1/chat/completions`."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from litestar import Controller, Request, Response, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody
from litestar.response import ServerSentEvent

from service.api.openai import wire
from service.api.openai.asking import MAX_BODY_BYTES, Asking, FilePart, Said
from service.api.openai.errors import on_openai_error, openai_responses
from service.api.openai.ids import completion_id
from service.api.openai.models import require_model
from service.api.openai.results import ChatUsage, Extension, chat_usage, extension
from service.api.openai.streaming import DONE, ChatForm, LatePermit, Piece
from service.api.principal import FOR_ASKING
from service.api.schemas.questions import AnswerBody
from service.api.schemas.repeats import IdempotencyKey
from service.api.sse import event_stream
from service.core.keys import Principal
from service.core.sampling import Question
from service.core.services import Services
from service.errors import Invalid, ServiceError


class ChatFile(msgspec.Struct, frozen=True):
    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None


class ChatPart(msgspec.Struct, frozen=True):
    """Of a message: text, or a file."""

    type: Literal["text", "file", "refusal"]
    text: str | None = None
    refusal: str | None = None
    file: ChatFile | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ChatPart] | None = None
    tool_calls: Any = None


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class ChatRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is here with any value is looked at only to refuse it, or not at all: docs/openai.md has the table."""

    model: str
    messages: list[ChatMessage]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    metadata: dict[str, Any] | None = None
    audio: Any = None
    frequency_penalty: Any = None
    function_call: Any = None
    functions: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    modalities: Any = None
    moderation: Any = None
    n: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    presence_penalty: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None
    user: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def question(self) -> Question:
        """Without its text."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return Question("", most, self.temperature, self.top_p, self.top_k, stop, self.seed)


REFUSED = {
    "audio": wire.NOTHING,
    "frequency_penalty": wire.ZERO,
    "function_call": wire.NO_CHOICE,
    "functions": wire.NO_TOOLS,
    "logit_bias": wire.NOTHING,
    "logprobs": wire.NOTHING,
    "modalities": wire.Refusal(lambda value: value == ["text"], "answers are text"),
    "moderation": wire.NOTHING,
    "n": wire.Refusal(lambda value: value == 1, "there is one answer"),
    "presence_penalty": wire.ZERO,
    "response_format": wire.TEXT,
    "tool_choice": wire.NO_CHOICE,
    "tools": wire.NO_TOOLS,
    "top_logprobs": wire.NOTHING,
    "verbosity": wire.MEDIUM,
    "web_search_options": wire.Refusal(lambda _: False, "nothing is looked up"),
}
IGNORED = (
    "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "reasoning_effort", "safety_identifier", "service_tier", "store", "user",
)  # fmt: skip
"""They say nothing of what is answered."""


class ChatAnswer(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    annotations: list[Any] = []


class Choice(msgspec.Struct, frozen=True):
    message: ChatAnswer
    finish_reason: Literal["stop", "length"]
    index: int = 0
    logprobs: None = None


class Completion(msgspec.Struct, frozen=True):
    """`preread` is ours: what the answer rests on, and what it took."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: ChatUsage
    preread: Extension
    object: Literal["chat.completion"] = "chat.completion"


class ChatController(Controller):
    """The whole conversation comes with every request; what is known of it is not computed again."""

    path = "/v1/chat/completions"
    tags = ("openai",)
    exception_handlers = {Exception: on_openai_error}  # noqa: RUF012 - Litestar reads this class attribute

    @post(
        status_code=200,
        opt=FOR_ASKING,
        request_max_body_size=MAX_BODY_BYTES,
        responses={
            200: ResponseSpec(Completion, description="The answer; with `stream`, an event stream instead."),
            **openai_responses(409, 413, 507),
        },
    )
    async def create(
        self,
        request: Request,
        services: NamedDependency[Services],
        principal: NamedDependency[Principal],
        data: JSONBody[ChatRequest],
        idempotency_key: IdempotencyKey = None,
    ) -> Response[Completion | None] | ServerSentEvent:
        """Answer the last message."""
        require_model(services, data.model)
        wire.refuse_unsupported(data, REFUSED)
        asking = Asking(request, services, principal)
        documents = wire.documents_of(data.metadata)
        said = [_said(n, message) for n, message in enumerate(data.messages)]
        await asking.open(said, data.question(), documents=documents, repeat_key=idempotency_key, body=data)
        created = int(services.clock.now())
        if data.stream:
            usage = data.stream_options is not None and data.stream_options.include_usage
            return event_stream(
                chat_chunks(asking, created, data.model, include_usage=usage),
                heartbeat_s=services.settings.sse_heartbeat_s,
                stopping=services.stopping,
                permit=LatePermit(asking),
                form=ChatForm(),
            )
        answer = await asking.whole()
        return Response(_completion(answer, asking, created, data.model) if answer is not None else None)


async def chat_chunks(asking: Asking, created: int, model: str, *, include_usage: bool) -> AsyncIterator[Piece]:
    """The chunks of an answer, as it comes. Raises the error it ends with."""
    stream = await asking.ask()
    head = {
        "id": completion_id(stream.answer_id),
        "object": "chat.completion.chunk",
        "created": created,
        "model": model,
    }
    head |= {"usage": None} if include_usage else {}

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**head, "choices": [choice]}

    yield Piece(chunk({"role": "assistant", "content": "", "refusal": None}))
    async with aclosing(stream.events()) as events:
        async for event in events:
            if isinstance(event.data, ServiceError):
                raise event.data
            if event.name == "token":
                yield Piece(chunk({"content": event.data["text"]}))
            elif event.name == "done":
                answer = msgspec.convert(event.data, AnswerBody)
                more = {"preread": extension(answer, stream.session_id)}
                yield Piece(chunk({}, _finish(answer)) | more)
                if include_usage:
                    yield Piece({**head, "choices": [], "usage": chat_usage(answer)})
                yield Piece(DONE)


def _completion(answer: AnswerBody, asking: Asking, created: int, model: str) -> Completion:
    assert asking.stream is not None
    choice = Choice(ChatAnswer(answer.answer), _finish(answer))
    more = extension(answer, asking.stream.session_id)
    return Completion(completion_id(answer.id), created, model, [choice], chat_usage(answer), more)


def _finish(answer: AnswerBody) -> Literal["stop", "length"]:
    return "length" if answer.finish_reason == "length" else "stop"


def _said(n: int, message: ChatMessage) -> Said:
    """Raises Invalid for what no message here can have."""
    if message.tool_calls:
        raise Invalid("There are no tools here.", code="unsupported_parameter", param=f"messages[{n}].tool_calls")
    if not isinstance(message.content, list):
        return Said(_role(message.role), [message.content or ""])
    texts, files = [], []
    for m, part in enumerate(message.content):
        at = f"messages[{n}].content[{m}]"
        if part.type == "file":
            if part.file is None or message.role != "user":
                raise Invalid("A file is `{'type': 'file', 'file': {...}}` in a message of the user.", param=at)
            files.append(FilePart(part.file.file_id, part.file.file_data, part.file.filename, f"{at}.file"))
        elif (text := part.text if part.type == "text" else part.refusal) is not None:
            texts.append(text)
        else:
            raise Invalid(f"A part of the type {part.type} needs `{part.type}`.", param=at)
    return Said(_role(message.role), texts, files)


def _role(role: str) -> str:
    return "system" if role == "developer" else role
