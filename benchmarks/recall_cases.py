"""Reads the documents of `recall.py` and computes the questions, once: what was computed is kept in a folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recall_texts import Fact, facts, planted, texts
from torch import Tensor

from cache_store.layout import KVLayout, KVType
from cache_store.rows import take_rows
from cache_store.segments import Segments
from service.engine.fetch.sentences import starts_finder
from service.engine.models.card import load_card
from service.engine.prompt import PromptTemplate
from service.engine.protocol import Rows
from service.engine.tokenizer import Tokenizer
from service.engine.torch_engine.runner import TorchRunner

N_TOKENS = 6144
SINKS, WINDOW = 16, 256
FACTS_EACH = 10
KV_TYPE = KVType.K8V4


@dataclass(frozen=True)
class Question:
    """`queries`: float32 ``[n_heads, heads per KV head, rows, head_dim]`` of the whole prompt; `rows` of them are the
    question's own. `fact`: the tokens of the sentence that answers it, ``[first, last)`` in its document."""

    text: str
    wording: str
    fact: tuple[int, int]
    rows: tuple[int, int]
    queries: Tensor


@dataclass(frozen=True)
class Case:
    """A document of N_TOKENS tokens: records of the layers with index heads, its questions, and the tokens that begin a
    sentence."""

    records: dict[int, bytes]
    questions: list[Question]
    starts: list[int]


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    facts: list[tuple[Fact, tuple[int, int]]]


def prompts(template: PromptTemplate, n_documents: int) -> list[Prompt]:
    """Tokens of the documents, facts in each, all different."""
    chosen = facts(FACTS_EACH * n_documents)
    parts = [chosen[i : i + FACTS_EACH] for i in range(0, len(chosen), FACTS_EACH)]
    return [_prompt(template, text, part) for text, part in zip(texts(), parts, strict=False)]


def _prompt(template: PromptTemplate, text: str, chosen: list[Fact]) -> Prompt:
    starts = template.document(text).starts
    room = N_TOKENS - WINDOW - 40 * len(chosen)
    whole, places = planted(text, chosen, starts[2 * SINKS], starts[room])
    document = template.document(whole)
    found = []
    for fact, (begin, end) in zip(chosen, places, strict=True):
        tokens = [n for n, start in enumerate(document.starts, document.first_text) if begin <= start < end]
        found.append((fact, (tokens[0], tokens[-1] + 1)))
    assert all(first >= SINKS and last <= N_TOKENS - WINDOW for _, (first, last) in found)
    return Prompt(document.ids[:N_TOKENS], found)


class Reader:
    """A model on one thread, and what it has computed before."""

    def __init__(self, model_dir: Path, heads: list[tuple[int, int]], folder: Path, device: str) -> None:
        card, tokenizer = load_card(model_dir), Tokenizer.load(model_dir)
        self.layout: KVLayout = card.layout(KV_TYPE)
        self.template = PromptTemplate(card.prompt, tokenizer)
        self.heads = heads
        self.find_starts = starts_finder(tokenizer)
        self._device = device
        self._model_dir = model_dir
        self._runner: TorchRunner | None = None
        names = "-".join(f"{layer}.{head}" for layer, head in heads)
        self.folder = folder / f"{card.digests.weights[:8]}-{names}"
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def runner(self) -> TorchRunner:
        if self._runner is None:
            self._runner = TorchRunner.load(
                self._model_dir,
                kv_type=KV_TYPE,
                compute_dtype="float32",
                n_slots=1,
                tail_tokens=256,
                device=self._device,
            )
        return self._runner

    def case(self, number: int, prompt: Prompt, segment_tokens: int) -> Case:
        """Document `number` read in segments of `segment_tokens`."""
        path = self.folder / f"{number}-{segment_tokens}.pt"
        starts = self.find_starts(np.array(prompt.ids)).tolist()
        if path.exists():
            kept = torch.load(path, weights_only=True)
            return Case(kept["records"], [Question(**question) for question in kept["questions"]], starts)
        records, questions = self._read(prompt, Segments(segment_tokens, SINKS))
        kept = {"records": records, "questions": [vars(question) for question in questions]}
        torch.save(kept, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        return Case(records, questions, starts)

    def blocks(self, name: str, ids: list[int], segments: Segments) -> list[list[memoryview]]:
        """Encoded blocks ``[block][layer]`` of a document, computed once and kept under a name."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            torch.save([[bytes(record) for record in block] for block in self._prefilled(ids, segments)], path)
        return [[memoryview(bytearray(record)) for record in block] for block in torch.load(path, weights_only=True)]

    def _read(self, prompt: Prompt, segments: Segments) -> tuple[dict[int, bytes], list[Question]]:
        blocks = self._prefilled(prompt.ids, segments)
        layers = sorted({layer for layer, _ in self.heads})
        records = {layer: b"".join(block[layer] for block in blocks) for layer in layers}
        resident = self.resident(blocks, segments)
        slot = self.runner.new_tail()
        questions = [
            self._asked(Rows(slot, resident, []), fact, text, place)
            for fact, place in prompt.facts
            for text in fact.questions
        ]
        self.runner.free_tail(slot)
        self.runner.free_document(resident)
        return records, questions

    def _prefilled(self, ids: list[int], segments: Segments) -> list[list[memoryview]]:
        """Encoded blocks ``[block][layer]`` of the whole document."""
        runner, blocks = self.runner, []
        document = runner.new_document(SINKS + segments.segment_tokens)
        for first, last in segments.ranges(len(ids)):
            if first:
                runner.keep_prefix(document, SINKS)
            for chunk in range(first, last, runner.limits.chunk_tokens):
                blocks += runner.prefill_chunk(document, ids[chunk : min(chunk + runner.limits.chunk_tokens, last)])
        runner.free_document(document)
        return blocks

    def resident(self, blocks: list[list[memoryview]], segments: Segments) -> Any:
        """The first SINKS tokens and the last WINDOW ones."""
        rows = np.r_[:SINKS, N_TOKENS - WINDOW : N_TOKENS]
        document = self.runner.new_document(len(rows))
        for layer in range(self.layout.n_layers):
            taken = take_rows([block[layer] for block in blocks], N_TOKENS, self.layout, rows)
            self.runner.load_blocks(document, layer, 0, memoryview(bytearray().join(taken)), len(rows))
        self.runner.finish_load(
            document,
            len(rows),
            next_position=segments.next_position(N_TOKENS),
            last_position=segments.last_position(N_TOKENS),
        )
        return document

    def _asked(self, rows: Rows, fact: Fact, text: str, place: tuple[int, int]) -> Question:
        rows.tokens = self.template.question(text)
        first, last = len(self.template.question_prefix_ids), len(self.template.question_suffix_ids)
        queries = self.runner.question_queries(rows, self.heads)
        return Question(text, fact.wording, place, (first, len(rows.tokens) - last), queries)
