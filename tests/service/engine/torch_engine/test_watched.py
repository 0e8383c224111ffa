"""Where the torch engine says that answers look: what the attention of stock transformers is."""

import pytest
import torch

from service.engine.protocol import Rows
from service.engine.watch.masses import WATCH_SPAN

HEADS = [(0, 1), (2, 2)]
PIECES = [2, 3]


@pytest.fixture
def runner(load_runner):
    runner = load_runner()
    runner.watched_heads = HEADS
    yield runner
    runner.watched_heads = ()


def expected(eager, tokens, prompt, answer):
    """Probabilities ``[answer, all tokens]`` of the rows that each answer token follows from, the mean of the heads."""
    ids = torch.tensor([[*tokens, *prompt, *answer[:-1]]])
    with torch.inference_mode():
        attentions = eager(ids, output_attentions=True).attentions
    group = attentions[0].shape[1] // 3
    of_heads = [attentions[i][0, h * group : (h + 1) * group].mean(0) for i, h in HEADS]
    return torch.stack(of_heads).mean(0)[-len(answer) :]


def answer(runner, document, asked, watched):
    """Feed prompts and answers of several sequences, in one batch a step; the slots."""
    slots = [runner.new_tail() for _ in asked]
    for slot in watched(slots):
        runner.watch_tail(slot)
    runner.forward([Rows(s, document, prompt[:-3]) for s, (prompt, _) in zip(slots, asked, strict=True)])
    runner.forward([Rows(s, document, prompt[-3:]) for s, (prompt, _) in zip(slots, asked, strict=True)])
    for step in range(sum(PIECES) - 1):
        runner.forward([Rows(s, document, [given[step]]) for s, (_, given) in zip(slots, asked, strict=True)])
    return slots


def test_it_is_the_attention_of_the_answer(runner, eager, token_ids, prefill):
    tokens = token_ids(600)
    document, _ = prefill(runner, tokens)
    asked = [(token_ids(n, seed=n), token_ids(5, seed=n + 1)) for n in (9, 40)]
    slots = answer(runner, document, asked, lambda slots: slots)
    for slot, (prompt, given) in zip(slots, asked, strict=True):
        looks = runner.tail_looks(slot, document, PIECES)
        rows = torch.stack([x.sum(0) for x in expected(eager, tokens, prompt, given).split(PIECES)])
        spans = torch.stack([x.sum(1) for x in rows[:, :600].split(WATCH_SPAN, 1)], 1)
        torch.testing.assert_close(looks.document, spans, rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(looks.tail, rows[:, 600:], rtol=1e-2, atol=1e-4)
        runner.free_tail(slot)
    runner.free_document(document)


def test_watching_changes_no_answer_and_only_what_is_watched_is_kept(runner, token_ids, prefill):
    asked = [(token_ids(n, seed=n), token_ids(5, seed=n + 1)) for n in (9, 12)]
    last = []
    for watched in (lambda slots: [], lambda slots: slots[1:]):
        document, _ = prefill(runner, token_ids(300))  # anew: steps lay its layers out in another way
        slots = answer(runner, document, asked, watched)
        rows = [Rows(s, document, [given[-1]]) for s, (_, given) in zip(slots, asked, strict=True)]
        last.append(runner.forward(rows))
        with pytest.raises(ValueError, match="0 rows of slot"):
            runner.tail_looks(slots[0], document, [1])
        if watched(slots):
            assert runner.tail_looks(slots[1], document, [6]).document.shape == (1, 19)
        with pytest.raises(ValueError, match="0 rows of slot"):  # it ends the watch
            runner.tail_looks(slots[1], document, [1])
        for slot in slots:
            runner.free_tail(slot)
        runner.free_document(document)
    for before, after in zip(*last, strict=True):
        assert torch.equal(before, after)


def test_rows_of_rejected_drafts_are_forgotten(runner, token_ids, prefill):
    prompt, given, wrong = token_ids(9, seed=9), token_ids(4, seed=10), token_ids(3, seed=11)
    document, _ = prefill(runner, token_ids(300))
    slots = [runner.new_tail() for _ in range(2)]
    for slot in slots:
        runner.watch_tail(slot)
        runner.forward([Rows(slot, document, prompt, logits_from=8)])
    for step in range(4):
        runner.forward([Rows(slots[0], document, [given[step]])])
    runner.forward([Rows(slots[1], document, [*given[:2], *wrong])])
    runner.truncate_tail(slots[1], 11)
    runner.forward([Rows(slots[1], document, given[2:])])
    one, other = (runner.tail_looks(slot, document, PIECES) for slot in slots)
    torch.testing.assert_close(one.document, other.document, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(one.tail, other.tail, rtol=1e-3, atol=1e-5)
    for slot in slots:
        runner.free_tail(slot)
    runner.free_document(document)
