"""Documents of any length for `recall_long.py`: text that comes with every Python, and sentences planted in it."""

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

from benchmarks.recall_texts import Fact, facts, planted
from service.engine.prompt import PromptTemplate

N_FACTS = 40
WORDINGS = ("same words", "other question", "other words", "far")
LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo"})
SHORTEST = 80
"""Characters of a docstring that is worth reading."""
MARGIN = 300
"""Tokens at either end without a fact: what is resident holds none."""


@dataclass(frozen=True)
class LongDocument:
    """Token ids with the prompt around them, and each fact with the tokens ``[first, last)`` of its sentence."""

    ids: list[int]
    facts: list[tuple[Fact, tuple[int, int]]]


def long_document(template: PromptTemplate, n_tokens: int) -> LongDocument:
    """A document of `n_tokens` tokens or a little less. Raises ValueError when there is not so much text."""
    chosen = [fact for fact in facts(2 * N_FACTS) if fact.wording in WORDINGS][:N_FACTS]
    text = _text_of(template, n_tokens - 28 * N_FACTS)
    starts = template.document(text).starts
    whole, places = planted(text, chosen, starts[MARGIN], starts[-MARGIN])
    document = template.document(whole)
    return LongDocument(document.ids, list(zip(chosen, _tokens(document, places), strict=True)))


def _tokens(document, places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """From characters to tokens. `places` are in order."""
    found, n = [], 0
    starts, first = document.starts, document.first_text
    for begin, end in places:
        while starts[n] < begin:
            n += 1
        begun = n
        while n < len(starts) and starts[n] < end:
            n += 1
        found.append((first + begun, first + n))
    return found


def excerpts(document: LongDocument, n_tokens: int) -> Iterator[LongDocument]:
    """Parts of at most `n_tokens` tokens that hold all facts, each between the document's own beginning and end."""
    head, tail = document.ids[:24], document.ids[-8:]
    left = list(document.facts)
    while left:
        first = max(left[0][1][0] - 1000, len(head))
        last = min(first + n_tokens - len(head) - len(tail), len(document.ids) - len(tail))
        inside = [(fact, place) for fact, place in left if place[1] <= last]
        left = left[len(inside) :]
        moved = [(fact, (a - first + len(head), b - first + len(head))) for fact, (a, b) in inside]
        yield LongDocument([*head, *document.ids[first:last], *tail], moved)


def _text_of(template: PromptTemplate, n_tokens: int) -> str:
    """Text of about `n_tokens` tokens, none of it twice: the language reference, then docstrings of the standard
    library, in the order of its files."""
    text = _reference()
    if len(text) < 5 * n_tokens:
        text = "\n\n".join([text, *dict.fromkeys(_docstrings())])
    guess = text[: 5 * n_tokens]
    starts = template.document(guess).starts
    if len(starts) < n_tokens:
        raise ValueError(f"there is text for {len(starts)} tokens only, not for {n_tokens}")
    return guess[: starts[n_tokens - 1]]


def _reference() -> str:
    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def _docstrings() -> Iterator[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        if LEFT_OUT & set(path.relative_to(folder).parts):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        strings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        yield from (text for text in strings if text and len(text) >= SHORTEST)
