"""The prompt around a document: document first, question last, as token ids that are never made again.

    document  = document_prefix + text + document_suffix                    the snapshot
    question  = [pending + turn_end] + question_prefix + text + question_suffix
    answer    = sampled ids; the last one, often the end token, is left pending

The parts are texts, rendered once from the model's chat template when the model is imported.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from service.engine.tokenizer import Tokenizer

PROMPT_VERSION = 1

DEFAULT_SYSTEM_TEXT = (
    "You answer questions about the document below. Answer briefly using only the document. "
    "If the document does not contain the answer, say so.\n\n"
)

REPLAY_TEXT = "Repeat this part of the document exactly, word for word."
"""What a document is asked for when its summary slots are chosen: see `PromptTemplate.replay_ids`."""


class PromptParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fixed texts of a model's prompt. `document_prefix` ends with the system text.

    `question_suffix` ends with the assistant header. `turn_end` is what the template puts after an answer;
    its first token usually is the end token that the model itself gives.
    """

    document_prefix: str
    document_suffix: str
    question_prefix: str
    question_suffix: str
    turn_end: str


def template_digest(chat_template: str, parts: PromptParts) -> str:
    """Identity of a prompt: 32 hex digits over the chat template, the parts and our version."""
    body = msgspec.json.encode([PROMPT_VERSION, chat_template, msgspec.structs.astuple(parts)])
    return hashlib.blake2b(body, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class DocumentTokens:
    """A document's prompt: `ids[first_text : first_text + n_text]` are its text, the rest is the template's.

    `starts[i]` is the character offset in the text where text token `i` begins.
    """

    ids: list[int]
    first_text: int
    n_text: int
    starts: list[int]


class PromptTemplate:
    """Makes token ids of documents and questions. Immutable, thread-safe."""

    def __init__(self, parts: PromptParts, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.document_prefix_ids = tokenizer.encode_template(parts.document_prefix)
        self.document_suffix_ids = tokenizer.encode_template(parts.document_suffix)
        self.question_prefix_ids = tokenizer.encode_template(parts.question_prefix)
        self.question_suffix_ids = tokenizer.encode_template(parts.question_suffix)
        self.turn_end_ids = tokenizer.encode_template(parts.turn_end)

    @property
    def document_overhead(self) -> int:
        """Template tokens around a document's text."""
        return len(self.document_prefix_ids) + len(self.document_suffix_ids)

    @property
    def question_overhead(self) -> int:
        """Template tokens around a follow-up question's text, one pending token included."""
        return 1 + len(self.turn_end_ids) + len(self.question_prefix_ids) + len(self.question_suffix_ids)

    def document(self, text: str) -> DocumentTokens:
        """The ids of a document's snapshot; control strings in `text` stay text."""
        plain = self._tokenizer.encode_plain_offsets(text)
        ids = [*self.document_prefix_ids, *plain.ids, *self.document_suffix_ids]
        return DocumentTokens(ids, len(self.document_prefix_ids), len(plain.ids), plain.starts)

    def question(self, text: str, *, pending_ids: Sequence[int] = (), follow_up: bool = False) -> list[int]:
        """The ids to compute for a question: all that is not in the snapshot or an earlier turn's KV.

        `pending_ids` are those of the session's last answer; with them, or with `follow_up`, the last turn is
        ended first, without saying its end token twice.
        """
        ids = [*pending_ids]
        if pending_ids or follow_up:
            said = bool(ids) and ids[-1:] == self.turn_end_ids[:1]
            ids += self.turn_end_ids[1:] if said else self.turn_end_ids
        ids += self.question_prefix_ids
        ids += self._tokenizer.encode_plain(text)
        ids += self.question_suffix_ids
        return ids

    def replay_ids(self) -> list[int]:
        """The ids after which a part of a document is repeated, to see which of its tokens that takes: a question like
        any other, since what a model attends to depends on the form of the chat."""
        return self.question(REPLAY_TEXT)
