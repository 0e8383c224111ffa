"""Bodies of `/v1/responses`: what is asked, and the object that a response is."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from service.api.openai import wire
from service.api.openai.asking import FilePart, Said
from service.api.openai.ids import message_id, response_id
from service.api.openai.results import Extension, ResponseUsage, annotations, response_usage
from service.api.schemas.questions import AnswerBody
from service.core.sampling import Question
from service.errors import Invalid

Status = Literal["completed", "failed", "in_progress", "cancelled", "incomplete"]


class InputPart(msgspec.Struct, frozen=True):
    """Of a message: text, or a file."""

    type: Literal["input_text", "output_text", "input_file", "refusal"]
    text: str | None = None
    refusal: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None


class InputItem(msgspec.Struct, frozen=True):
    """A message. Items of the type `reasoning`, which other models write, are passed over."""

    type: Literal["message", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None


class ResponseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is here with any value is looked at only to refuse it, or not at all: docs/openai.md has the table."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    access_programs: Any = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    include: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    parallel_tool_calls: Any = None
    prompt: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    stream_options: Any = None
    text: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None
    truncation: Any = None
    user: Any = None

    def question(self) -> Question:
        """Without its text."""
        return Question("", self.max_output_tokens, self.temperature, self.top_p)

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    def shown(self) -> dict[str, Any]:
        """What a response says of how it was asked for."""
        return {
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "max_output_tokens": self.max_output_tokens,
            "model": self.model,
            "metadata": self.metadata or {},
            "temperature": self.temperature or 0.0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "store": self.is_stored,
        }


def _text_only(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    asked = value.get("format")
    return value.get("verbosity") in (None, "medium") and (asked is None or wire.TEXT.is_fine(asked))


REFUSED = {
    "background": wire.NOTHING,
    "background_options": wire.NOTHING,
    "context_management": wire.NOTHING,
    "conversation": wire.Refusal(wire.NOTHING.is_fine, "go on from a response by `previous_response_id`"),
    "image": wire.NOTHING,
    "moderation": wire.NOTHING,
    "prompt": wire.NOTHING,
    "text": wire.Refusal(_text_only, "answers are plain text"),
    "tool_choice": wire.NO_CHOICE,
    "tools": wire.NO_TOOLS,
    "top_logprobs": wire.NOTHING,
    "truncation": wire.Refusal(lambda value: value == "disabled", "nothing is left out of a conversation silently"),
}
IGNORED = (
    "access_programs", "include", "max_tool_calls", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "stream_options", "user",
)  # fmt: skip
"""They say nothing of what is answered."""


class Outcome(msgspec.Struct, frozen=True):
    """How far a response is; `error` is its code and message."""

    status: Status
    text: str = ""
    answer: AnswerBody | None = None
    error: dict[str, str] | None = None
    more: Extension | None = None
    names: Mapping[str, str] = {}


def response_object(answer_id: str, created: int, shown: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    """A response as it is sent."""
    usage: ResponseUsage | None = response_usage(outcome.answer) if outcome.answer else None
    return {
        "id": response_id(answer_id),
        "object": "response",
        "created_at": created,
        "status": outcome.status,
        "background": False,
        "error": outcome.error,
        "incomplete_details": {"reason": "max_output_tokens"} if outcome.status == "incomplete" else None,
        "output": [message_item(answer_id, outcome)] if outcome.answer else [],
        "parallel_tool_calls": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "truncation": "disabled",
        "usage": usage,
        **shown,
        "preread": outcome.more,
    }


def message_item(answer_id: str, outcome: Outcome) -> dict[str, Any]:
    """The only item of a response's output."""
    has_text = bool(outcome.text or outcome.answer)
    return {
        "id": message_id(answer_id),
        "type": "message",
        "role": "assistant",
        "status": outcome.status if outcome.status in ("in_progress", "completed") else "incomplete",
        "content": [text_part(outcome)] if has_text else [],
    }


def text_part(outcome: Outcome) -> dict[str, Any]:
    """The text of the output, with its citations once they are known."""
    cited = annotations(outcome.answer, outcome.names) if outcome.answer else []
    text = outcome.answer.answer if outcome.answer else outcome.text
    return {"type": "output_text", "text": text, "annotations": cited, "logprobs": []}


def status_of(answer: AnswerBody) -> Status:
    if answer.finish_reason == "cancelled":
        return "cancelled"
    return "incomplete" if answer.finish_reason == "length" else "completed"


def said_of(request: ResponseRequest) -> list[Said]:
    """The messages of a request, instructions first. Raises Invalid for what no message here can have."""
    said = [Said("system", [request.instructions])] if request.instructions else []
    if isinstance(request.input, str):
        return [*said, Said("user", [request.input])]
    return said + [_said(n, item) for n, item in enumerate(request.input) if item.type == "message"]


def _said(n: int, item: InputItem) -> Said:
    if item.role is None:
        raise Invalid("A message needs a role.", param=f"input[{n}].role")
    role = "system" if item.role == "developer" else item.role
    if not isinstance(item.content, list):
        return Said(role, [item.content or ""])
    texts, files = [], []
    for m, part in enumerate(item.content):
        at = f"input[{n}].content[{m}]"
        if part.file_url:
            raise Invalid(
                "Nothing is fetched from other servers: send the file.", code="unsupported_parameter", param=at
            )
        if part.type == "input_file":
            if role != "user":
                raise Invalid("Files are in messages of the user.", param=at)
            files.append(FilePart(part.file_id, part.file_data, part.filename, at))
        elif (text := part.refusal if part.type == "refusal" else part.text) is not None:
            texts.append(text)
        else:
            raise Invalid(f"A part of the type {part.type} needs `text`.", param=at)
    return Said(role, texts, files)
