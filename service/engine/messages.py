"""Requests to an engine and the events it sends back; the same structs in one process and over the wire."""

import msgspec

PROTOCOL_VERSION = 4


class DocumentRef(msgspec.Struct, frozen=True):
    """Names a document's snapshot: the owner is part of every key."""

    owner_id: str
    document_id: str


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine is, told once at start. `fingerprint` holds the fields of `cache_store.Fingerprint`.

    `tail_tokens`: what one session may hold beside its document (turns, question and answer); 0 is no bound.
    `resident_tokens`: the largest document that the device's budget holds; 0 is no bound. `sink_multiple`: sinks of a
    windowed document are a multiple of it. `n_index_heads`: 0 means that nothing can be fetched, so that a document
    must be kept whole. `has_slots`: whether summaries are kept; without, `summary_tokens` of a document count as 0.
    `draft_model`: the name of the model that guesses, "" for none.
    """

    engine: str
    model_name: str
    compute_dtype: str
    kv_type: str
    fingerprint: dict[str, str]
    fingerprint_digest: str
    max_context: int
    bytes_per_token: int
    block_tokens: int
    max_batch: int
    pid: int
    tail_tokens: int = 0
    resident_tokens: int = 0
    sink_multiple: int = 1
    n_index_heads: int = 0
    has_slots: bool = True
    draft_model: str = ""


class Sampling(msgspec.Struct, frozen=True):
    """Temperature 0 is greedy. `stop` strings are not part of the answer. `seed` makes sampling repeatable."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()


class Retention(msgspec.Struct, frozen=True):
    """Windowed retention: what stays resident of a document whose full KV is kept cold.

    Sinks, summary slots and window are in tokens of a head, slots in the mean: each head has another number of others.
    An engine without slots (`EngineInfo.has_slots`) keeps none. With `segment_tokens` the document is prefilled in
    segments of that many tokens (a multiple of the block size), each behind the same sinks, else in one.
    `fetch_tokens`: how many cold tokens one question may bring back.
    """

    sink_tokens: int
    summary_tokens: int
    window_tokens: int
    segment_tokens: int = 0
    fetch_tokens: int = 256


class BuildRequest(msgspec.Struct, frozen=True):
    """Prefill a document and publish its snapshot. Goes on from the building journal when there is one.

    Without `retention` the whole document is resident.
    """

    request_id: str
    document: DocumentRef
    token_ids: list[int]
    retention: Retention | None = None


class SpanRef(msgspec.Struct, frozen=True, order=True):
    """Consecutive tokens of a document, by their place in its token ids. `document`: its place among the documents of
    the session."""

    first: int
    n_tokens: int
    document: int = 0


class TurnRef(msgspec.Struct, frozen=True):
    """An earlier turn of the session: the tokens whose KV it left, and the id its KV is stored under.

    `spans`: what was fetched for it; the next question sees it again while there is room.
    """

    kv_id: str
    token_ids: list[int]
    spans: list[SpanRef] = []


class PartRef(msgspec.Struct, frozen=True):
    """One of the documents of a session over several. Its snapshot of all tokens is that of `token_digest` and
    `retention`; of these tokens the ranges `resident`, ``[first, last)`` in order, are in memory for every question."""

    document: DocumentRef
    token_digest: str
    n_tokens: int
    resident: list[tuple[int, int]]
    retention: Retention | None = None


class AnswerRequest(msgspec.Struct, frozen=True):
    """Answer one question from a document's snapshot and the session's earlier turns.

    With `parts` it is answered from several documents, a part of each in memory, and at most `fetch_tokens` tokens of
    all others are brought back. `document` is the first of them then, `n_document_tokens` the tokens of all together,
    and nothing is said by `token_digest` and `retention`.

    `prompt_ids` are the tokens not computed yet: what the last turn left pending, the question, the header.
    `token_digest` and `n_document_tokens` must be those of the snapshot, or it is a miss.
    `kv_id` is the id under which this turn's own KV is persisted ("" persists nothing). A `pinned` document leaves the
    device and the host's memory only when no other can.
    """

    request_id: str
    session_id: str
    document: DocumentRef
    token_digest: str
    n_document_tokens: int
    turns: list[TurnRef]
    prompt_ids: list[int]
    sampling: Sampling
    kv_id: str = ""
    pinned: bool = False
    retention: Retention | None = None
    parts: list[PartRef] = []
    fetch_tokens: int = 0


class BuildProgress(msgspec.Struct, frozen=True, tag="build_progress"):
    """Tokens prefilled and durable so far; `stage` is `prefilling`, `compacting` or `persisting`."""

    stage: str
    done: int
    total: int


class BuildDone(msgspec.Struct, frozen=True, tag="build_done"):
    """`prefilled_tokens` were computed by this build, `resumed_tokens` came from the journal.

    `already` is true when a valid snapshot was found and nothing was computed. `resident_*` and `index_nbytes`: what a
    windowed document keeps in memory, 0 for one that is kept whole; `resident_tokens` of a head in the mean,
    `summary_tokens` of them chosen for it.
    """

    n_tokens: int
    n_blocks: int
    nbytes: int
    prefilled_tokens: int
    resumed_tokens: int
    seconds: float
    already: bool = False
    resident_tokens: int = 0
    resident_nbytes: int = 0
    index_nbytes: int = 0
    summary_tokens: int = 0


class AnswerStarted(msgspec.Struct, frozen=True, tag="answer_started"):
    """Sent when the KV is in place and the question is about to be prefilled.

    `source` is the tier the document came from: `gpu` (resident on a card), `host` (resident without a card, or copied
    back to it from host memory), `disk`, `redis`, `object`, `none`.
    `reused_tokens`: tokens whose KV was used without computing it (document and earlier turns).
    `prefilled_tokens`: tokens computed once for this answer. `miss_reason`: of an earlier turn's KV, or None.
    `spans`: cold tokens of a windowed document that were fetched for this question, in order; `fetch_ms`: what finding
    and copying them took; `first_pass_tokens`: tokens of the question, and of the turn before, that were computed once
    more to find them; `second_pass_tokens`: those of the passage by which a second place was looked for.
    """

    source: str
    restored_tokens: int
    restore_ms: float
    reused_tokens: int
    prefilled_tokens: int
    queue_ms: float
    miss_reason: str | None = None
    spans: list[SpanRef] = []
    fetch_ms: float = 0.0
    first_pass_tokens: int = 0
    second_pass_tokens: int = 0


class AnswerText(msgspec.Struct, frozen=True, tag="answer_text"):
    """A piece of the answer: whole characters only, never part of a stop string."""

    text: str


class Look(msgspec.Struct, frozen=True):
    """`n_tokens` tokens of a document from `first` on, and the attention that fell on them. `document`: its place among
    the documents of the session."""

    first: int
    n_tokens: int
    mass: float
    document: int = 0


class PieceLooks(msgspec.Struct, frozen=True):
    """Where a piece of an answer looked: its characters through `end`, from where the piece before ended.

    `mass` in [0, 1]: the attention probability that fell on the documents, the mean over the piece's tokens and the
    heads that were watched; `looks`: the places with most of it, best first, which need not sum up to it.
    """

    end: int
    mass: float
    looks: list[Look]


class AnswerDone(msgspec.Struct, frozen=True, tag="answer_done"):
    """The end of an answer that ran.

    `finish_reason`: `stop` (end token or stop string), `length`, `cancelled`.
    `token_ids` are the tokens this turn added to the session's KV, `pending_ids` those sampled but not computed:
    the next question must begin with them. `kv_stored` says whether the turn's KV is durable.
    `engine_prefilled_tokens` is the engine's own counter of tokens that went through prefill for this answer.
    `looks`: piece by piece where the answer looked in its documents, none where that is not watched; `looks_ms`: what
    finding that took when the answer was over. `steps`: steps of the model in which its tokens were sampled;
    `drafted_tokens` were guessed (from the document and the session, or by a draft model) and computed in them,
    `accepted_tokens` of these were what the model said.
    """

    finish_reason: str
    token_ids: list[int]
    pending_ids: list[int]
    completion_tokens: int
    ttft_ms: float
    total_ms: float
    decode_tokens_per_s: float
    engine_prefilled_tokens: int
    kv_stored: bool
    kv_nbytes: int = 0
    looks: list[PieceLooks] = []
    looks_ms: float = 0.0
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The end of a request that did not succeed.

    `code`: `snapshot_miss` (with `miss_reason`; rebuild and ask again), `cancelled`, `too_long`, `storage`,
    `busy`, `engine_lost` (the engine process died; retryable), `internal`. `document_id`: of several documents the one
    whose snapshot was missing; None where it is not known, or is no document's own.
    """

    code: str
    detail: str
    retryable: bool = False
    miss_reason: str | None = None
    document_id: str | None = None


class EngineStats(msgspec.Struct, frozen=True):
    """Counters and gauges of an engine process. `*_total` only grow during its life. `host_*`: documents that left the
    card, in host memory. `index_*`: indexes of windowed documents, apart from `resident_nbytes`. `documents`: those in
    memory, whole or in part. `drafted_tokens_total` were guessed and computed, `accepted_tokens_total` of these were
    sampled; `lookup_nbytes`: host memory in which documents' tokens are found again for it.

    `draft_*` are of the draft model, 0 without one, and in none of the others: documents in its memory, those that were
    asked about without its snapshot (`misses`), tokens of documents that it prefilled and all that it prefilled, its
    own steps. Of the guesses, `draft_guessed_tokens_total` were the draft model's, and not looked up."""

    prefilled_tokens_total: int
    decoded_tokens_total: int
    steps_total: int
    document_prefill_tokens_total: int
    running: int
    waiting: int
    resident_documents: int
    resident_nbytes: int
    document_references: int
    tail_slots_used: int
    rss_nbytes: int
    host_documents: int = 0
    host_nbytes: int = 0
    index_documents: int = 0
    index_nbytes: int = 0
    documents: list[DocumentRef] = []
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    lookup_nbytes: int = 0
    draft_documents: int = 0
    draft_nbytes: int = 0
    draft_misses_total: int = 0
    draft_document_prefill_tokens_total: int = 0
    draft_prefilled_tokens_total: int = 0
    draft_steps_total: int = 0
    draft_guessed_tokens_total: int = 0
    draft_accepted_tokens_total: int = 0


class ReleaseDone(msgspec.Struct, frozen=True):
    """What `release` removed from the memory of the device or host."""

    objects: int
    nbytes: int


BuildEvent = BuildProgress | BuildDone | Failed
AnswerEvent = AnswerStarted | AnswerText | AnswerDone | Failed


def is_last(event: BuildEvent | AnswerEvent) -> bool:
    """Whether an event ends its request."""
    return isinstance(event, BuildDone | AnswerDone | Failed)
