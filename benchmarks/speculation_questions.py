"""Questions about texts of this repository, made of their own words: as many as are wanted, always the same ones."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXTS = (
    "examples/contract/contract.md", "examples/letter.txt", "examples/notes.md", "README.md", "docs/faq.md",
    "docs/formats.md", "docs/web.md", "docs/containers.md", "docs/encryption.md", "docs/recall.md",
)  # fmt: skip
"""All bundled, and of at most some five thousand tokens."""
FORMS = (
    "What does the text say about {}?",
    "Is anything said about {}, and what?",
    "Who or what has to do with {}?",
    "Explain {} in one sentence.",
)
QUOTING = ("Quote the sentence about {}.", "Repeat word for word the sentence that mentions {}.")
_WORDS = (6, 40)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about one of `TEXTS`."""

    text: str
    question: str


def sentences(text: str) -> list[str]:
    """Those of plain prose, without tables, code and headings."""
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.DOTALL)
    paragraphs = (part for part in re.split(r"\n\s*\n", text) if part[:1].isalpha())
    joined = (re.sub(r"[`*_]|\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(part.split())) for part in paragraphs)
    found = (sentence for part in joined for sentence in re.split(r"(?<=[.!?])\s+", part))
    return [sentence for sentence in found if _WORDS[0] <= len(sentence.split()) <= _WORDS[1]]


def topic(sentence: str) -> str:
    """Some words from the middle of a sentence, of which the first is a long one."""
    words = [word.strip(".,;:()\"'") for word in sentence.split()]
    starts = [i for i in range(1, len(words) - 2) if len(words[i]) > 4] or [1]
    first = starts[len(starts) // 2]
    return " ".join(words[first : first + 3])


def questions(n: int, forms: tuple[str, ...] = FORMS, texts: tuple[str, ...] = TEXTS) -> list[Asked]:
    """`n` questions, evenly over the texts as far as they go, ordered by text. Raises ValueError for too many."""
    turns = [_about(text, forms) for text in texts]
    found: list[Asked] = []
    while len(found) < n:
        before = len(found)
        found += [asked for turn in turns if (asked := next(turn, None)) is not None]
        if len(found) == before:
            raise ValueError(f"the texts give {before} questions, not {n}")
    order = {text: i for i, text in enumerate(texts)}
    return sorted(found[:n], key=lambda asked: order[asked.text])


def _about(text: str, forms: tuple[str, ...]) -> Iterator[Asked]:
    """Each form about every sentence, another one first in each round."""
    told = sentences((ROOT / text).read_text("utf-8"))
    for round_ in range(len(forms)):
        for i, sentence in enumerate(told):
            yield Asked(text, forms[(i + round_) % len(forms)].format(topic(sentence)))
