"""The benchmark of long documents: where it plants and cuts, that it runs through an engine, and its page."""

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import recall_long, recall_long_texts
from benchmarks.recall_long_page import page
from benchmarks.recall_long_texts import MARGIN, N_FACTS, WORDINGS, LongDocument, excerpts, long_document
from service.engine.models.card import load_card
from service.engine.prompt import PromptTemplate
from service.engine.tokenizer import Tokenizer

pytestmark = pytest.mark.model
N_TOKENS = 9000


@pytest.fixture(scope="module")
def document(demo_model: Path) -> LongDocument:
    template = PromptTemplate(load_card(demo_model).prompt, Tokenizer.load(demo_model))
    return long_document(template, N_TOKENS)


def test_facts_stand_where_they_are_said_to_and_every_tenth_has_every_wording(document, demo_model):
    tokenizer = Tokenizer.load(demo_model)
    assert 0.97 * N_TOKENS < len(document.ids) <= N_TOKENS
    assert len(document.facts) == N_FACTS
    for fact, (first, last) in document.facts:
        assert fact.sentence.split(" ", 1)[1] in tokenizer.decode(document.ids[first:last])
    places = [place for _, place in document.facts]
    assert places[0][0] > MARGIN
    assert places[-1][1] < len(document.ids) - MARGIN // 2
    assert all(a[1] <= b[0] for a, b in pairwise(places))
    assert [fact.wording for fact, _ in document.facts] == list(WORDINGS) * (N_FACTS // len(WORDINGS))


def test_excerpts_hold_every_fact_once_and_fit(document):
    parts = list(excerpts(document, 3000))
    assert [fact for part in parts for fact, _ in part.facts] == [fact for fact, _ in document.facts]
    assert all(len(part.ids) <= 3000 for part in parts)
    whole = {fact: document.ids[first:last] for fact, (first, last) in document.facts}
    for part in parts:
        assert all(part.ids[first:last] == whole[fact] for fact, (first, last) in part.facts)


def test_too_much_text_is_refused(demo_model, monkeypatch):
    monkeypatch.setattr(recall_long_texts, "_reference", lambda: "a sentence. " * 50)
    monkeypatch.setattr(recall_long_texts, "_docstrings", lambda: iter(()))
    template = PromptTemplate(load_card(demo_model).prompt, Tokenizer.load(demo_model))
    with pytest.raises(ValueError, match="there is text for"):
        long_document(template, 5000)


def test_it_runs_through_an_engine_and_writes_its_page(document, demo_model, tmp_path, monkeypatch):
    few = LongDocument(document.ids, document.facts[:3])
    monkeypatch.setattr(recall_long, "long_document", lambda template, n_tokens: few)
    arguments = recall_long.parser().parse_args(
        f"--model {demo_model} --engine fake --tokens 9000 --whole 9000 --per-fact 1 --work {tmp_path}".split()
    )
    figures = asyncio.run(recall_long.run(arguments))
    (result,) = figures["results"]
    assert len(result["answers"]) == len(result["whole"]) == 3
    assert result["resident_tokens"] == 16 + 256
    text = page(figures)
    assert "| 8,9" in text
    assert f"{N_FACTS} questions a document" in text
