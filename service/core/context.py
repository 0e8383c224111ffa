"""What a question builds on: the document, the earlier turns, and the room the model's context leaves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from service.core.retention import Policy, stored_policy
from service.db.models import DocumentRow, TurnRow
from service.engine.messages import EngineInfo, SpanRef, TurnRef
from service.errors import Invalid, TooLong

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
    """Spans as stored."""
    return [[span.first, span.n_tokens] for span in spans]


def unpack_spans(stored: Sequence[Sequence[int]]) -> list[SpanRef]:
    return [SpanRef(first, n_tokens) for first, n_tokens in stored]


@dataclass(frozen=True, slots=True)
class Context:
    """A ready document and the turns of a session that a question follows."""

    document: DocumentRow
    turns: list[TurnRef]
    pending_ids: list[int]

    @classmethod
    def of(cls, document: DocumentRow, turns: Sequence[TurnRow]) -> "Context":
        refs = [TurnRef(turn.kv_id or turn.id, unpack_ids(turn.token_ids), unpack_spans(turn.spans)) for turn in turns]
        return cls(document, refs, unpack_ids(turns[-1].pending_ids) if turns else [])

    @property
    def n_document_tokens(self) -> int:
        return self.document.token_count or 0

    @property
    def policy(self) -> Policy:
        return stored_policy(self.document.policy)

    @property
    def n_turn_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

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
    taken, policy = context.policy.next_position(context.n_document_tokens), context.policy
    room = engine.max_context - taken
    numbers = f"The model's context is {engine.max_context} tokens, the document takes {taken}"
    # What is fetched for a question lies beside the turns, at positions of its own.
    if engine.tail_tokens and engine.tail_tokens - policy.fetch_tokens < room:
        room = engine.tail_tokens - policy.fetch_tokens
        numbers = f"A session has room for {room} tokens beside its document"
    numbers += f", the {len(context.turns)} earlier turns {context.n_turn_tokens}, the question {n_prompt}"
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
