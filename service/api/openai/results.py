"""What an answer came to, in OpenAI's words; and what those have no words for."""

from collections.abc import Mapping

import msgspec

from service.api.openai.ids import file_id
from service.api.schemas.questions import (
    AnswerBody,
    CacheBody,
    CitationBody,
    ProvenanceBody,
    TimingsBody,
    UnsupportedBody,
    UsageBody,
)


class PromptDetails(msgspec.Struct, frozen=True):
    """`cached_tokens` were not computed: the document's, and those of earlier turns. What was computed is kept."""

    cached_tokens: int
    cache_write_tokens: int
    audio_tokens: int = 0


class CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class ChatUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Extension(msgspec.Struct, frozen=True):
    """The member `preread`: the answer as our own API tells it, without its text."""

    session_id: str
    answer_id: str
    citations: list[CitationBody]
    unsupported: list[UnsupportedBody]
    provenance: list[ProvenanceBody]
    notice: str | None
    usage: UsageBody
    cache: CacheBody
    timings: TimingsBody


class FileCitation(msgspec.Struct, frozen=True):
    """An annotation. `index`: where in the text the sentence that rests on the file ends."""

    file_id: str
    filename: str
    index: int
    type: str = "file_citation"


def chat_usage(answer: AnswerBody) -> ChatUsage:
    n_prompt, cached, written, n_answer = _tokens(answer)
    details = PromptDetails(cached, written)
    return ChatUsage(n_prompt, n_answer, n_prompt + n_answer, details, CompletionDetails())


def response_usage(answer: AnswerBody) -> ResponseUsage:
    n_prompt, cached, written, n_answer = _tokens(answer)
    return ResponseUsage(n_prompt, InputDetails(cached, written), n_answer, OutputDetails(), n_prompt + n_answer)


def extension(answer: AnswerBody, session_id: str) -> Extension:
    return Extension(
        session_id,
        answer.id,
        answer.citations,
        answer.unsupported,
        answer.provenance,
        answer.notice,
        answer.usage,
        answer.cache,
        answer.timings,
    )


def annotations(answer: AnswerBody, names: Mapping[str, str]) -> list[FileCitation]:
    """Of an answer's citations; `names` are the files' by the ids of the documents."""
    return [
        FileCitation(file_id(each.document_id), names.get(each.document_id, ""), each.answer_end or 0)
        for each in answer.citations
    ]


def _tokens(answer: AnswerBody) -> tuple[int, int, int, int]:
    """Of the prompt, how many of them were there, how many computed; and of the answer."""
    usage = answer.usage
    return (
        usage.reused_tokens + usage.prefilled_tokens,
        usage.reused_tokens,
        usage.prefilled_tokens,
        usage.completion_tokens,
    )
