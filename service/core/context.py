"""What a question builds on: the document, the earlier turns, and the room the model's context leaves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ingest.model import PageTokens
from service.core.provenance import Reading
from service.core.retention import Policy, stored_policy
from service.core.together import Together
from service.db.models import DocumentRow, TurnRow
from service.engine.messages import EngineInfo, SpanRef, TurnRef
from service.errors import Invalid, TooLong
from service.words import counted

DEFAULT_ANSWER_TOKENS = 512
_LEAST_ANSWER_TOKENS = 8
"""A question that leaves less than this for the answer is refused."""


class Prompt(Protocol):
    """Makes the tokens of a question (`service.engine.prompt.PromptTemplate`)."""

    def question(self, text: str, *, pending_ids: Sequence[int] = (), follow_up: bool = False) -> list[int]: ...


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as stored: little-endian int32."""
    return np.asarray(token_ids, "<i4").tobytes()


def unpack_ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def pack_spans(spans: Sequence[SpanRef]) -> list[list[int]]:
    """Spans as stored: first token and length, and the place of the document unless it is the first of the session."""
    return [[span.first, span.n_tokens, *([span.document] if span.document else [])] for span in spans]


def unpack_spans(stored: Sequence[Sequence[int]]) -> list[SpanRef]:
    return [SpanRef(*numbers) for numbers in stored]


@dataclass(frozen=True, slots=True)
class Context:
    """The ready documents of a session and the turns that a question follows. `together`: what of each is in memory,
    when there are several."""

    documents: Sequence[DocumentRow]
    turns: list[TurnRef]
    pending_ids: list[int]
    together: Together | None = None

    @classmethod
    def of(
        cls, documents: Sequence[DocumentRow], turns: Sequence[TurnRow], together: Together | None = None
    ) -> "Context":
        refs = [TurnRef(turn.kv_id or turn.id, unpack_ids(turn.token_ids), unpack_spans(turn.spans)) for turn in turns]
        return cls(documents, refs, unpack_ids(turns[-1].pending_ids) if turns else [], together)

    @property
    def document(self) -> DocumentRow:
        """The only document, or the first one."""
        return self.documents[0]

    @property
    def n_document_tokens(self) -> int:
        """Of all documents."""
        return sum(document.token_count or 0 for document in self.documents)

    @property
    def policy(self) -> Policy:
        """Of the only document."""
        return stored_policy(self.document.policy)

    @property
    def next_position(self) -> int:
        """Where the turns begin."""
        return self.together.next_position if self.together else self.policy.next_position(self.n_document_tokens)

    @property
    def fetch_tokens(self) -> int:
        """How many tokens one question may bring back."""
        return self.together.fetch_tokens if self.together else self.policy.fetch_tokens

    @property
    def n_turn_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    def readings(self, pages: Sequence[Sequence[PageTokens]], spans: Sequence[SpanRef]) -> list[Reading]:
        """What an answer saw of each document when `spans` were fetched for it; `pages` are those of each."""
        if self.together is None:
            return [Reading.windowed(self.document.id, self.policy, self.n_document_tokens, pages[0], spans)]
        return [
            Reading(part.document.document_id, part.resident, pages[n], [span for span in spans if span.document == n])
            for n, part in enumerate(self.together.parts)
        ]

    def prompt_ids(self, prompt: Prompt, question: str) -> list[int]:
        """Tokens to compute for `question`: what the last answer left pending, then the question's turn."""
        return prompt.question(question, pending_ids=self.pending_ids, follow_up=bool(self.turns))


def answer_room(context: Context, n_prompt: int, max_tokens: int | None, *, engine: EngineInfo, limit: int) -> int:
    """How many tokens the answer may have.

    Raises TooLong when the question does not fit or leaves no room for what was asked, Invalid for a
    `max_tokens` outside 1 to `limit`; the numbers are in the message.
    """
    if max_tokens is not None and not 1 <= max_tokens <= limit:
        raise Invalid(f"max_tokens is {max_tokens}; it must be from 1 to {limit}.", param="max_tokens")
    taken, fetched = context.next_position, context.fetch_tokens
    room = engine.max_context - taken
    several = context.together is not None
    takes = "the documents take" if several else "the document takes"
    numbers = f"The model's context is {engine.max_context:,} tokens, {takes} {taken:,}"
    # What is fetched for a question lies beside the turns, at positions of its own.
    if engine.tail_tokens and engine.tail_tokens - fetched < room:
        numbers = f"A session holds {engine.tail_tokens:,} tokens beside its document{'s' if several else ''}"
        numbers += f" (the model's context would have room for {room:,})"
        numbers += f", of which what is fetched for a question may take {fetched}" if fetched else ""
        room = engine.tail_tokens - fetched
    if context.turns:
        takes = "takes" if len(context.turns) == 1 else "take"
        numbers += f"; {counted(len(context.turns), 'earlier turn')} {takes} {context.n_turn_tokens:,}"
    numbers += f"; the question has {n_prompt:,}"
    left = room - context.n_turn_tokens - n_prompt
    if left < _LEAST_ANSWER_TOKENS:
        most = max(0, left + n_prompt - _LEAST_ANSWER_TOKENS)
        raise TooLong(
            f"{numbers}. Ask in at most {most} tokens, or begin a new session to drop the earlier turns.",
            param="question",
        )
    if max_tokens is not None and max_tokens > left:
        raise TooLong(f"{numbers}; {left} are left, but max_tokens is {max_tokens}.", param="max_tokens")
    return max_tokens or min(DEFAULT_ANSWER_TOKENS, limit, left)
