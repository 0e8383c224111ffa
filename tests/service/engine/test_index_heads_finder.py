import json

import pytest
import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from cache_store.layout import KVType
from service.engine.fake_runner import FakeRunner
from service.engine.fetch.index import SPAN_TOKENS
from service.engine.index_heads_facts import make_facts, plant
from service.engine.index_heads_finder import choose_heads, figures_of, find_index_heads
from service.engine.index_heads_probe import Case, Planted, ask_all
from service.engine.models.errors import EngineRefused
from service.engine.models.gate import gate_text
from service.engine.prompt import PromptParts, PromptTemplate
from service.engine.tokenizer import Tokenizer

PARTS = PromptParts("<|im_start|>", "", "<|im_end|>", "<|im_end|>", "<|im_end|>")
GOOD = (1, 1)


class OneGoodHead(FakeRunner):
    """Of its four KV heads one finds tokens that are in question and document; the others look everywhere alike."""

    def question_queries(self, rows, heads):
        queries = super().question_queries(rows, heads)
        for place, head in enumerate(heads):
            if head != GOOD:
                queries[place] = 0
        return queries


@pytest.fixture(scope="module")
def template():
    """With whole words as tokens, as far as the text has them often."""
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sentences = [fact.sentence for part in range(2) for fact in make_facts(24, part)]
    tokenizer.train_from_iterator([gate_text(), *sentences * 2], trainer)
    return PromptTemplate(PARTS, Tokenizer(json.dumps(json.loads(tokenizer.to_str())).encode()))


def fake(kind=FakeRunner, **options):
    return kind(n_layers=2, n_kv_heads=2, kv_type=KVType.K8V4, vocab_size=4000, **options)


def test_facts_are_the_same_every_time_and_of_other_things_in_each_part():
    assert make_facts(18, 0) == make_facts(18, 0)
    facts = [fact for part in range(2) for fact in make_facts(24, part)]
    assert len({question for fact in facts for question in fact.questions}) == len(facts) * 2
    with pytest.raises(ValueError, match="24 facts"):
        make_facts(25, 1)


def test_a_planted_sentence_is_where_it_is_said_to_be():
    facts = make_facts(18, 1)
    text, places = plant(gate_text(), facts)
    assert [text[first:last] for first, last in places] == [fact.sentence for fact in facts]
    assert len(text) == len(gate_text()) + sum(len(fact.sentence) + 1 for fact in facts)
    assert all(text[first - 2 : first] in (". ", ".\n") or text[first - 1] == "\n" for first, _ in places)


def test_the_good_head_is_found(template):
    found = find_index_heads(fake(OneGoodHead), template, "w" * 32)
    assert found.pairs == [GOOD]
    assert found.weights == "w" * 32
    assert found.n_questions >= 20
    assert found.heads[0].mean_reciprocal_rank == found.mean_reciprocal_rank > 0.8
    assert found.in_first_two > 0.8


def test_progress_ends_at_its_total(template):
    told = []
    found = find_index_heads(fake(), template, "w", progress=lambda *step: told.append(step))
    assert [done for _, done, _ in told] == list(range(1, told[0][2] + 1))
    assert 1 <= len(found.heads) <= 4


def test_facts_lie_where_a_question_does_not_see_them(template):
    runner = fake()
    planted = Planted.make(runner, template, 0)
    cases = list(ask_all(runner, template, planted, [(0, 0)]))
    assert len(cases) == planted.n_questions
    n_spans = cases[0].figures.shape[1]
    for case in cases:
        assert 256 // SPAN_TOKENS <= case.right.start < case.right.stop <= n_spans
        assert case.figures[:, : 256 // SPAN_TOKENS].sum() == 0
        assert case.figures[:, case.right].sum() > 0
    assert runner.n_documents == runner.n_tails == 0


def test_a_short_context_takes_less_text(template):
    planted = Planted.make(fake(max_context=1600), template, 0)
    assert len(planted.ids) < 1600
    assert 6 <= len(planted.facts) < len(Planted.make(fake(), template, 0).facts)
    with pytest.raises(EngineRefused, match="context of 512"):
        find_index_heads(fake(max_context=512), template, "w")


def case(*figures, right=0):
    return Case(torch.tensor(figures), slice(right, right + 1))


def test_a_head_that_is_always_right_beats_one_that_is_sure_and_sometimes_lost():
    steady = [0.3, 0.2, 0.1], [0.3, 0.2, 0.1], [0.3, 0.2, 0.1]
    sure = [0.9, 0.001, 0], [0.9, 0.001, 0], [0.0, 0.9, 0]
    cases = [case(a, b) for a, b in zip(steady, sure, strict=True)]
    assert figures_of(cases, [0])[1:] == (1, 1)
    assert figures_of(cases, [1])[1] < 1
    assert choose_heads([case(a, b) for a, b in zip(steady[:1] + steady[2:], sure[:1] + sure[2:], strict=True)])[0] == 0


def test_a_head_that_helps_is_added_and_one_that_does_not_is_not():
    blind, left, right = [0.1, 0.1, 0.1], [0.3, 0.2, 0.0], [0.3, 0.0, 0.2]
    assert set(choose_heads([case(blind, left, right)])) == {1, 2}
    assert choose_heads([case(left, blind)]) == [0]
    assert choose_heads([case(left, left, left)]) == [0, 1]


def test_a_second_head_may_take_away_a_little_and_not_much():
    sure, nearly, unsure = [0.6, 0.1, 0.1], [0.5, 0.1, 0.1], [0.2, 0.2, 0.1]
    assert choose_heads([case(sure, nearly)]) == [0, 1]
    assert choose_heads([case(sure, unsure)]) == [0]
