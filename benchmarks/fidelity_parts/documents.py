"""Documents with planted facts, and their questions as token ids."""

import hashlib
import random
from dataclasses import dataclass

from benchmarks.fidelity_parts import facts, texts
from service.engine.prompt import PromptTemplate
from service.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with its gold answer, as rows behind a document.

    ``ids[:n_question]`` are the question's prompt, the rest is the answer but for its last token. ``targets`` are the
    answer's tokens, predicted by the rows from ``n_question - 1``; ``value`` marks those that are scored. `fact`: first
    and last token (exclusive) of the sentence in the document, (0, 0) for an aggregate.
    """

    kind: str
    ids: list[int]
    n_question: int
    targets: list[int]
    value: list[bool]
    fact: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Document:
    ids: list[int]
    text: str
    first_text: int
    starts: list[int]
    questions: list[Asked]

    @property
    def digest(self) -> str:
        """Eight hex digits of the text."""
        return hashlib.blake2b(self.text.encode(), digest_size=4).hexdigest()


def make_documents(
    tokenizer: Tokenizer, prompt: PromptTemplate, n_documents: int, n_tokens: int, seed: int, n_each: int = 10
) -> list[Document]:
    """Documents of about `n_tokens` tokens; no paragraph is in two of them while there are enough."""
    paragraphs = texts.paragraphs(seed)
    made = []
    for i in range(n_documents):
        rng = random.Random(f"{seed}/{i}")
        planted, questions = facts.plants(rng, n_each)
        room = n_tokens - prompt.document_overhead - sum(len(tokenizer.encode_plain(p.text)) + 1 for p in planted)
        background = _take(tokenizer, paragraphs, room)
        made.append(_document(tokenizer, prompt, _mixed(background, planted), questions))
    return made


def _take(tokenizer: Tokenizer, paragraphs: list[str], n_tokens: int) -> list[str]:
    """Paragraphs from the front of the list, which go to its end, of at most `n_tokens` tokens."""
    taken = []
    while True:
        n_tokens -= len(tokenizer.encode_plain(paragraphs[0])) + 2
        if n_tokens < 0:
            return taken
        taken.append(paragraphs[0])
        paragraphs.append(paragraphs.pop(0))


def _mixed(background: list[str], planted: list[facts.Plant]) -> str:
    """Sentences go to the end of a paragraph, tables stand between two. Raises ValueError without a paragraph."""
    if not background:
        raise ValueError("the planted facts leave no room for text: make documents longer, or plant fewer")
    blocks = [[paragraph] for paragraph in background]
    for plant in sorted(planted, key=lambda p: p.place):
        at = min(int(plant.place * len(blocks)), len(blocks) - 1)
        blocks[at].append(plant.text)
    out = []
    for block in blocks:
        sentences = [part for part in block if not part.startswith("|")]
        out += [" ".join(sentences), *(part for part in block if part.startswith("|"))]
    return "\n\n".join(out)


def _document(tokenizer: Tokenizer, prompt: PromptTemplate, text: str, questions: list[facts.Question]) -> Document:
    tokens = prompt.document(text)
    return Document(
        tokens.ids,
        text,
        tokens.first_text,
        tokens.starts,
        [_asked(tokenizer, prompt, q, text, tokens.first_text, tokens.starts) for q in questions],
    )


def _asked(
    tokenizer: Tokenizer,
    prompt: PromptTemplate,
    question: facts.Question,
    text: str,
    first_text: int,
    starts: list[int],
) -> Asked:
    head = prompt.question(question.text)
    said = f"{question.lead} {question.value}"
    answer = tokenizer.encode_plain_offsets(said + ".")
    return Asked(
        question.kind,
        [*head, *answer.ids[:-1]],
        len(head),
        answer.ids,
        [len(question.lead) <= start < len(said) for start in answer.starts],
        _fact(question, text, first_text, starts),
    )


def _fact(question: facts.Question, text: str, first_text: int, starts: list[int]) -> tuple[int, int]:
    if not question.sentence:
        return 0, 0
    first = text.index(question.sentence)
    inside = [i for i, start in enumerate(starts) if first <= start < first + len(question.sentence)]
    return first_text + inside[0], first_text + inside[-1] + 1
