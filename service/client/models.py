"""What the server sends, as typed values.

Fields that a newer server adds are ignored, and those that an older one lacks have a default.
"""

from datetime import datetime
from typing import Any

import msgspec


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """`done` of `total` `unit` of `stage`; `eta_s` is None until a rate is known."""

    stage: str
    done: int = 0
    total: int = 0
    unit: str = ""
    eta_s: float | None = None


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """What of a document stays in memory: all of it (`full`), or so many tokens of its beginning, its whole and its
    end."""

    preset: str
    automatic: bool = False
    sink_tokens: int = 0
    summary_tokens: int = 0
    window_tokens: int = 0
    segment_tokens: int = 0
    n_segments: int = 1
    fetch_tokens: int = 0


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A tier that has the snapshot: `disk`, `redis` or `object`."""

    tier: str
    state: str = ""
    known_at: datetime | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a document's reading."""

    state: str
    fingerprint: str | None = None
    kv_type: str | None = None
    nbytes: int | None = None
    prefilled_tokens: int | None = None
    build_s: float | None = None
    retention: Retention | None = None
    resident_tokens: int | None = None
    resident_nbytes: int | None = None
    index_nbytes: int | None = None
    tiers: list[Place] = []


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a document or a turn failed, and what to do."""

    code: str
    message: str = ""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A document. `status`: `queued`, `parsing`, `prefilling`, `compacting`, `persisting`, then `ready`, `failed` or
    `cancelled`."""

    id: str
    title: str = ""
    filename: str = ""
    media_type: str = ""
    nbytes: int = 0
    sha256: str = ""
    page_count: int | None = None
    token_count: int | None = None
    status: str
    progress: Progress
    snapshot: Snapshot
    retention: dict[str, Any] = {}
    visibility: str = "private"
    access: str = "owner"
    pinned: bool = False
    warnings: list[str] = []
    created_at: datetime | None = None
    expires_at: datetime | None = None
    error: Failure | None = None

    @property
    def is_over(self) -> bool:
        """Whether its status changes no more."""
        return self.status in ("ready", "failed", "cancelled")


class Uploaded(Document, frozen=True, kw_only=True):
    """A document as an upload was answered. `created`: false when it was there before."""

    created: bool = True


class DocumentList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[Document]
    has_more: bool = False


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A page's text as the model got it; tokens [token_start, token_end) of the document are its own."""

    document_id: str
    number: int
    label: str | None = None
    text: str
    token_start: int = 0
    token_end: int = 0


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    tier: str
    objects: int = 0
    nbytes: int = 0


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What a deletion removed, tier by tier."""

    removed: list[Removed]


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """With whom something is shared: `user`, `organization` or `link`. `token` is there only when a link is made; it is
    a key for this one thing."""

    id: str
    kind: str = msgspec.field(name="with")
    name: str | None = None
    access: str
    created_at: datetime | None = None
    expires_at: datetime | None = None
    token: str | None = None


class ShareList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[Share]


class Citation(msgspec.Struct, frozen=True, kw_only=True):
    """`quote` is verbatim text of the page, from `page_start` to `page_end` of the text that `documents.page` gives;
    `answer_start` to `answer_end` is the sentence of the answer that rests on it. `score`, 0 to 1: how well they agree;
    `attention`, 0 to 1: how much of the sentence's attention to the document lay on that page."""

    document_id: str
    page: int
    quote: str
    score: float
    label: str | None = None
    answer_start: int | None = None
    answer_end: int | None = None
    page_start: int | None = None
    page_end: int | None = None
    attention: float | None = None


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Pages by what the answer could see of them: `verbatim`, `fetched` or `summary`."""

    document_id: str
    first_page: int
    last_page: int
    mode: str


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Characters [start, end) of an answer."""

    start: int
    end: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were reused, and that had to be computed."""

    document_tokens: int = 0
    reused_tokens: int = 0
    prefilled_tokens: int = 0
    completion_tokens: int = 0
    first_pass_tokens: int = 0
    second_pass_tokens: int = 0


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """Where the document's KV came from: `gpu`, `host`, `disk`, `redis`, `object`, or `none`."""

    source: str
    restored_tokens: int = 0
    restore_ms: float = 0.0
    miss_reason: str | None = None


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds from the moment the question was accepted; `ttft_ms`: to the first text. `steps` of the model gave
    the answer's tokens, of which `accepted_tokens` had been guessed rightly, of `drafted_tokens`."""

    queue_ms: float = 0.0
    restore_ms: float = 0.0
    ttft_ms: float | None = None
    total_ms: float = 0.0
    decode_tokens_per_s: float = 0.0
    fetch_ms: float = 0.0
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer. `finish_reason`: `stop`, `length` or `cancelled`. `unsupported`: its sentences that were not
    found in the document."""

    id: str
    text: str = msgspec.field(name="answer")
    finish_reason: str | None = None
    citations: list[Citation] = []
    provenance: list[Provenance] = []
    notice: str | None = None
    unsupported: list[Span] = []
    usage: Usage = Usage()
    cache: Cache = msgspec.field(default_factory=lambda: Cache(source="none"))
    timings: Timings = Timings()


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A question and what came of it. `status`: `running`, `done`, `failed`, `cancelled`."""

    id: str
    question: str
    status: str
    answer: Answer | None = None
    parameters: dict[str, Any] = {}
    created_at: datetime | None = None
    error: Failure | None = None


class UsageTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens over all turns of a session."""

    turns: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation over documents, without its turns."""

    id: str
    document_ids: list[str]
    title: str = ""
    instructions: str = ""
    forked_from: str | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None


class SessionDetail(Session, frozen=True, kw_only=True):
    """A session with its turns in order."""

    usage: UsageTotals = UsageTotals()
    turns: list[Turn] = []


class SessionList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[Session]
    has_more: bool = False


class Token(msgspec.Struct, frozen=True):
    """The next piece of an answer: whole characters. `end`: how many the answer has with it."""

    text: str
    end: int


class Done(msgspec.Struct, frozen=True):
    """The end of an answer, with all of it."""

    answer: Answer


Event = Token | Citation | Done
"""What the stream of an answer consists of: tokens, then citations, then one `Done`."""
