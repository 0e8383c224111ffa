"""Sessions over several documents: what of each is in memory for every question.

The model sees the prompt before a document's text once, then of every document its beginning, where the title stands,
and its last tokens. All else that an answer needs is found by the index heads and fetched.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from service.core.retention import FETCH_TOKENS, QUESTION_GAP, Bounds, stored_policy, why_no_heads
from service.db.models import DocumentRow
from service.engine.messages import DocumentRef, EngineInfo, PartRef
from service.engine.protocol import EngineClient
from service.errors import Invalid, TooLong

SINK_TOKENS = 16
BEGINNING_TOKENS = 32
WINDOW_TOKENS = 128
LEAST_WINDOW_TOKENS = 16
RESIDENT_TOKENS = 2048
"""Of all documents together, at most; their windows become shorter when there are many."""


@dataclass(frozen=True, slots=True)
class Together:
    """The parts of the documents, in their order; a question begins at `next_position` and brings back at most
    `fetch_tokens` tokens of what is not in memory."""

    parts: list[PartRef]
    next_position: int
    fetch_tokens: int


class Gathering:
    """Puts documents together as this server and its engine allow it. Asks the engine anew each time: it may come back
    with another model or budget. `n_prompt`: tokens of the prompt before a document's text."""

    def __init__(self, engine: EngineClient, bounds: Bounds, *, most_documents: int, n_prompt: int) -> None:
        self._engine = engine
        self._bounds = bounds
        self._most_documents = most_documents
        self._n_prompt = n_prompt

    def check(self, document_ids: Sequence[str]) -> None:
        """Raises Invalid for documents that no session can have: none, too many, or one named twice."""
        n, most = len(document_ids), self._most_documents
        if not 1 <= n <= most:
            raise Invalid(
                f"{n} documents were given; a session has from 1 to {most} (PREREAD_MAX_SESSION_DOCUMENTS).",
                param="document_ids",
            )
        if len(set(document_ids)) < n:
            raise Invalid("A document is named twice; name each once.", param="document_ids")

    def of(self, documents: Sequence[DocumentRow]) -> Together:
        """Of ready documents, at least two. Raises Invalid without index heads (``no_index_heads``), TooLong with the
        numbers when they do not fit the model's context or the memory for documents together."""
        info = self._engine.info
        if not info.n_index_heads:
            raise Invalid(
                "A session over several documents keeps a part of each in memory and finds the rest by the model's "
                f"index heads, which {why_no_heads(info, self._bounds)}, or ask each by itself.",
                code="no_index_heads",
                param="document_ids",
            )
        next_position = self._next_position(documents, info)
        window = self._window(len(documents), info)
        parts = [self._part(row, self._first(info) if n == 0 else None, window) for n, row in enumerate(documents)]
        return Together(parts, next_position, FETCH_TOKENS)

    def _next_position(self, documents: Sequence[DocumentRow], info: EngineInfo) -> int:
        """Documents stand side by side, at the positions at which they were read."""
        ends = {stored_policy(row.policy).end(row.token_count or 0): row for row in documents}
        end, room = max(ends), self._bounds.room_tokens
        if end + QUESTION_GAP + room > info.max_context:
            raise TooLong(
                f"The document {ends[end].id} takes {end:,} positions of the model's context of {info.max_context:,}. "
                f"Together with others it may take {max(info.max_context - QUESTION_GAP - room, 0):,}, as {room:,} are "
                f"kept for question and answer and {QUESTION_GAP} stay free. Ask it by itself, or upload it in "
                "two parts.",
                param="document_ids",
            )
        return end + QUESTION_GAP

    def _window(self, n: int, info: EngineInfo) -> int:
        """The last tokens that are kept of each of `n` documents."""
        most = min(RESIDENT_TOKENS, info.max_context - self._bounds.room_tokens - FETCH_TOKENS)
        most = min(most, info.resident_tokens) if info.resident_tokens else most
        beginnings = self._first(info) + (n - 1) * BEGINNING_TOKENS
        window = min(WINDOW_TOKENS, (most - beginnings) // n)
        if window < LEAST_WINDOW_TOKENS:
            raise TooLong(
                f"{n} documents need {beginnings + n * LEAST_WINDOW_TOKENS:,} tokens in memory, and there is room for "
                f"{max(most, 0):,}. Ask about fewer documents at once.",
                param="document_ids",
            )
        return window

    def _first(self, info: EngineInfo) -> int:
        """The first tokens that are kept of the first document: the prompt and its beginning, sinks among them."""
        multiple = info.sink_multiple
        return max(-(-SINK_TOKENS // multiple) * multiple, self._n_prompt + BEGINNING_TOKENS)

    def _part(self, row: DocumentRow, first: int | None, window: int) -> PartRef:
        """`first`: of the first document; others leave the prompt out."""
        n_tokens = row.token_count or 0
        begin, end = (0, first) if first is not None else (self._n_prompt, self._n_prompt + BEGINNING_TOKENS)
        begin, last = min(begin, n_tokens - 1), n_tokens - window
        resident = [(begin, end), (last, n_tokens)] if end < last else [(begin, n_tokens)]
        policy = stored_policy(row.policy)
        ref = DocumentRef(row.owner_id, row.id)
        return PartRef(ref, row.token_digest or "", n_tokens, resident, policy.retention)
