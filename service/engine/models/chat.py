"""Split a chat template into the fixed parts of a prompt, by rendering it once with markers in place of the
texts.
"""

from collections.abc import Callable

from service.engine.models.errors import SourceRefused
from service.engine.prompt import PromptParts

Message = dict[str, str]
Render = Callable[[list[Message], bool], str]
"""Renders messages, with or without the assistant header at the end."""

_DOCUMENT, _FIRST, _ANSWER, _SECOND = (f"[[preread-{part}]]" for part in ("document", "first", "answer", "second"))


def plain_parts(system_text: str) -> PromptParts:
    """The prompt of a model without a chat template."""
    return PromptParts(
        document_prefix=system_text,
        document_suffix="\n\n",
        question_prefix="Question: ",
        question_suffix="\nAnswer:",
        turn_end="\n\n",
    )


def split_template(render: Render, system_text: str) -> PromptParts:
    """The prompt parts of a chat template; the document goes with the system text.

    A template that knows no system role, or puts it behind the question, gets the document as a first user
    turn that the assistant acknowledges. Raises SourceRefused for a template in which no order puts the
    document first.
    """
    opening_turns: list[list[Message]] = [
        [{"role": "system", "content": system_text + _DOCUMENT}],
        [{"role": "user", "content": system_text + _DOCUMENT}, {"role": "assistant", "content": "Ask me."}],
    ]
    for opening in opening_turns:
        if parts := _split(render, opening):
            return parts
    raise SourceRefused("the chat template does not keep the document before the questions")


def _split(render: Render, opening: list[Message]) -> PromptParts | None:
    first = [*opening, {"role": "user", "content": _FIRST}]
    second = [*first, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _SECOND}]
    once, twice = (
        _cut(render, first, _DOCUMENT, _FIRST),
        _cut(render, second, _DOCUMENT, _FIRST, _ANSWER, _SECOND),
    )
    if once is None or twice is None or once[:2] != twice[:2] or once[-1] != twice[-1]:
        return None
    before, between, header = once
    # the shorter the question's own tokens the better, but a template may not render without a question
    alone = _cut(render, opening, _DOCUMENT, header=False)
    suffix = alone[1] if alone and between.startswith(alone[1]) else between
    question_prefix, turn_change = between.removeprefix(suffix), twice[3]
    if not turn_change.endswith(question_prefix):
        suffix, question_prefix = between, ""
    turn_end = turn_change[: len(turn_change) - len(question_prefix)]
    return PromptParts(before, suffix, question_prefix, header, turn_end)


def _cut(render: Render, messages: list[Message], *markers: str, header: bool = True) -> list[str] | None:
    """The texts around the markers, or None when the template fails or moves, drops or repeats one of
    them.
    """
    try:
        text = render(messages, header)
    except Exception:  # a template is a program of the model's, and fails as programs do
        return None
    pieces: list[str] = []
    for marker in markers:
        if text.count(marker) != 1:
            return None
        piece, text = text.split(marker)
        pieces.append(piece)
    return [*pieces, text]
