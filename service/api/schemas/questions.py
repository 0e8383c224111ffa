"""Bodies of questions and answers."""

from typing import Annotated

import msgspec

from service.api.schemas.limits import SAID_SOMETHING, limited
from service.core.results import result_of
from service.core.sampling import MAX_STOP_CHARS, MAX_STOPS, MAX_TEMPERATURE, MAX_TOP_K, Question
from service.db.models import TurnRow

Stop = Annotated[str, limited(minLength=1, maxLength=MAX_STOP_CHARS)]


class QuestionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question. What is left out has its default: greedy, as many tokens as fit up to 512."""

    question: Annotated[str, limited(pattern=SAID_SOMETHING)]
    max_tokens: Annotated[int | None, limited(minimum=1)] = None
    temperature: Annotated[float | None, limited(minimum=0, maximum=MAX_TEMPERATURE)] = None
    top_p: Annotated[float | None, limited(exclusiveMinimum=0, maximum=1)] = None
    top_k: Annotated[int | None, limited(minimum=0, maximum=MAX_TOP_K)] = None
    stop: Annotated[Stop | list[Stop] | None, limited(maxItems=MAX_STOPS)] = None
    seed: Annotated[int | None, limited(minimum=-(2**63), maximum=2**63 - 1)] = None
    stream: bool = False

    def to_question(self) -> Question:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Question(self.question, self.max_tokens, self.temperature, self.top_p, self.top_k, stop, self.seed)


class CitationBody(msgspec.Struct, frozen=True):
    """`quote` is verbatim text of the page, its characters `page_start` to `page_end`; the sentence of the answer that
    it supports is characters `answer_start` to `answer_end`: Unicode code points from 0, the end left out; null in
    answers from before there were places. `score` (0 to 1) says how well the sentence agrees with the quote,
    `attention` (0 to 1) how much of the sentence's attention to the documents fell on the page; null where it was not
    measured. `label` is the page's own name: a PDF's "iv", the heading that a page of another format starts under."""

    document_id: str
    page: int
    quote: str
    score: float
    answer_start: int | None = None
    answer_end: int | None = None
    page_start: int | None = None
    page_end: int | None = None
    attention: float | None = None
    label: str | None = None


class UnsupportedBody(msgspec.Struct, frozen=True):
    """Characters `start` to `end` of the answer: Unicode code points from 0, the end left out."""

    start: int
    end: int


class ProvenanceBody(msgspec.Struct, frozen=True):
    """How pages were attended to: `verbatim` (in memory as they stand, at least in part), `fetched` (a part was brought
    back for this question), `summary` (by chosen tokens only). Pages in none of them were not read."""

    document_id: str
    first_page: int
    last_page: int
    mode: str


class UsageBody(msgspec.Struct, frozen=True):
    """`prefilled_tokens` counts each token of document, earlier turns and question that was computed,
    once. `first_pass_tokens` are the question's tokens that were computed before, to find what to fetch;
    `second_pass_tokens` those of a passage by which a second place was looked for."""

    document_tokens: int
    reused_tokens: int
    prefilled_tokens: int
    completion_tokens: int
    first_pass_tokens: int = 0
    second_pass_tokens: int = 0


class CacheBody(msgspec.Struct, frozen=True):
    """`source`: `gpu`, `host`, `disk`, `redis`, `object`, or `none` when the document had to be read
    again."""

    source: str
    restored_tokens: int
    restore_ms: float
    miss_reason: str | None


class TimingsBody(msgspec.Struct, frozen=True):
    """From the moment the question was accepted. `ttft_ms` is null when no text came. `fetch_ms`: finding and copying
    what was fetched. `steps` of the model gave the answer's tokens; `drafted_tokens` were guessed (from the
    documents and the session, or by a draft model) and computed in them, `accepted_tokens` of these were right."""

    queue_ms: float
    restore_ms: float
    ttft_ms: float | None
    total_ms: float
    decode_tokens_per_s: float
    fetch_ms: float = 0.0
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class AnswerBody(msgspec.Struct, frozen=True):
    """The answer, also the body of the event `done`. `finish_reason`: `stop`, `length`, `cancelled`. `unsupported` are
    its sentences that were found nowhere in the documents. `notice` is a sentence when the answer rests mainly on pages
    that were not read word for word."""

    id: str
    answer: str
    finish_reason: str | None
    citations: list[CitationBody]
    unsupported: list[UnsupportedBody]
    provenance: list[ProvenanceBody]
    notice: str | None
    usage: UsageBody
    cache: CacheBody
    timings: TimingsBody


def answer_body(turn: TurnRow) -> AnswerBody:
    return msgspec.convert(result_of(turn), AnswerBody)
