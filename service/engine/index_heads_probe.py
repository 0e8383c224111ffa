"""Asks a model for facts that were planted in a text, and looks at what each of its heads looks at."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from service.engine.fetch.index import SPAN_TOKENS, KeyIndex, figures_of_head
from service.engine.index_heads_facts import make_facts, plant
from service.engine.models.errors import EngineRefused
from service.engine.models.gate import gate_text
from service.engine.prompt import PromptTemplate
from service.engine.protocol import Rows, Runner

N_FACTS = 18
_FEWEST_FACTS = 6
_QUESTION_ROOM = 64

_Blocks = list[list[memoryview]]


@dataclass(frozen=True, slots=True)
class Case:
    """What every head makes of one question: `figures` ``[n_heads, n_spans]``, 0 for spans that are not
    looked for; `right` are the spans that hold the fact."""

    figures: Tensor
    right: slice


@dataclass(frozen=True, slots=True)
class Planted:
    """A document's tokens, and per fact its questions and the spans that hold it."""

    ids: list[int]
    facts: list[tuple[tuple[str, str], slice]]
    block_tokens: int

    @classmethod
    def make(cls, runner: Runner, template: PromptTemplate, part: int) -> "Planted":
        """As much of the bundled text, with facts in it, as the context takes. Raises EngineRefused when that is too
        little."""
        facts = make_facts(N_FACTS, part)
        text, places = plant(gate_text(), facts)
        document = template.document(text)
        planted = cls(document.ids[: runner.limits.max_context - _QUESTION_ROOM], [], runner.layout.block_tokens)
        for fact, (begin, end) in zip(facts, places, strict=True):
            tokens = [n for n, start in enumerate(document.starts, document.first_text) if begin <= start < end]
            if planted.cold_from <= tokens[0] and tokens[-1] < planted.cold_to:
                planted.facts.append((fact.questions, slice(tokens[0] // SPAN_TOKENS, tokens[-1] // SPAN_TOKENS + 1)))
        if len(planted.facts) < _FEWEST_FACTS:
            raise EngineRefused(f"index heads cannot be found in a context of {runner.limits.max_context} tokens")
        return planted

    @property
    def n_questions(self) -> int:
        return 2 * len(self.facts)

    @property
    def seen(self) -> list[tuple[int, int]]:
        """The tokens that a question sees anyway."""
        return [(0, self.cold_from), (self.cold_to, len(self.ids))]

    @property
    def cold_from(self) -> int:
        """What a question sees of the document anyway ends here: its first block."""
        return self.block_tokens

    @property
    def cold_to(self) -> int:
        """What a question sees anyway begins here again: its last block, whole or not."""
        return (len(self.ids) - 1) // self.block_tokens * self.block_tokens


def ask_all(
    runner: Runner, template: PromptTemplate, planted: Planted, heads: Sequence[tuple[int, int]]
) -> Iterator[Case]:
    """Read the document and ask for each of its facts, as it is done with a windowed document: a question is computed
    over the ends of the document only, and its queries are scored against the keys of all of it."""
    blocks = _read(runner, planted.ids)
    index = KeyIndex(runner.layout, len(planted.ids), heads)
    for layer in index.layers:
        index.add(layer, 0, _joined(blocks, layer), len(planted.ids))
    ends = _ends(runner, planted, blocks)
    slot = runner.new_tail()
    try:
        for questions, right in planted.facts:
            for question in questions:
                queries = runner.question_queries(Rows(slot, ends, template.question(question)), heads)
                yield Case(figures_of_head(index.masses(queries, resident=planted.seen)), right)
    finally:
        runner.free_tail(slot)
        runner.free_document(ends)


def _read(runner: Runner, ids: Sequence[int]) -> _Blocks:
    """Encoded blocks of a document, ``[block][layer]``."""
    document = runner.new_document(len(ids))
    blocks: _Blocks = []
    try:
        for first in range(0, len(ids), runner.limits.chunk_tokens):
            blocks += runner.prefill_chunk(document, ids[first : first + runner.limits.chunk_tokens])
    finally:
        runner.free_document(document)
    return blocks


def _ends(runner: Runner, planted: Planted, blocks: _Blocks) -> Any:
    """A document of the first and the last block, which stand where they stood."""
    n_tokens = len(planted.ids)
    n_rows = planted.cold_from + n_tokens - planted.cold_to
    document = runner.new_document(n_rows)
    for layer in range(runner.layout.n_layers):
        runner.load_blocks(document, layer, 0, _joined([blocks[0], blocks[-1]], layer), n_rows)
    runner.finish_load(document, n_rows, next_position=n_tokens, last_position=n_tokens - 1)
    return document


def _joined(blocks: _Blocks, layer: int) -> memoryview:
    return memoryview(bytearray().join(block[layer] for block in blocks))
