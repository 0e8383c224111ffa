"""Messages, as clients of a chat send them, as questions with their answers and a last question."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from service.errors import Invalid

UNSAID = "(See above.)"
"""Stands where an answer has no question: its message was a document, or there was none."""


@dataclass(frozen=True, slots=True)
class Message:
    """`role`: `system`, `user` or `assistant`. `texts` are the parts of a message, in their order."""

    role: str
    texts: tuple[str, ...]
    document_ids: tuple[str, ...] = ()

    def without(self, n: int) -> "Message":
        """Without its text `n`."""
        return replace(self, texts=self.texts[:n] + self.texts[n + 1 :])


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question that was asked, and what was answered."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What was said before, and what is asked now."""

    history: tuple[Exchange, ...]
    question: str


def dialogue_of(messages: Sequence[Message], before: Sequence[Exchange] = ()) -> Dialogue:
    """System messages become part of the question that follows them: they are said after the document, which stays
    as it was read. `before` is what came before the first message. Raises Invalid without a last question."""
    history, said, answers = list(before), list[str](), list[str]()
    for message in messages:
        text = "\n\n".join(part for part in message.texts if part.strip())
        if message.role == "assistant":
            answers.append(text)
            continue
        if answers:
            history.append(_exchange(said, answers))
            said, answers = [], []
        if text:
            said.append(text)
    if answers or not said:
        raise Invalid("There is no question: the last message must be from the user, with text.", param="messages")
    return Dialogue(tuple(history), "\n\n".join(said))


def _exchange(said: list[str], answers: list[str]) -> Exchange:
    return Exchange("\n\n".join(said) or UNSAID, "\n\n".join(answers))
