"""Answers with drafts are those without: the same tokens, the same KV, the same ends."""

import random
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from service.engine.drafts.drafter import Drafter
from service.engine.drafts.lookup import DocumentLookup
from service.engine.drafts.rates import Rates
from service.engine.fake_rows import FakeDocument, FakeTail
from service.engine.fake_runner import FakeRunner
from service.engine.messages import Sampling
from service.engine.scheduler.detokenizer import Detokenizer
from service.engine.scheduler.loop import Scheduler
from service.engine.scheduler.sampling import NotFinite, Sampler
from service.engine.scheduler.sequence import AnswerWriter, Sequence
from service.engine.scheduler.stops import StopStrings

TOKENS = [7 * i % 251 for i in range(96)]
QUOTES = [*TOKENS[10:24], 255, *TOKENS[40:60], 254, 253, *TOKENS[5:9], 1]
"""Copies with interruptions: drafts are right, and wrong."""


class Free:
    """Costs of a runner for which rows are all the same: whatever may be right is drafted."""

    def record(self, *_):
        pass

    def has_base(self, _):
        return True

    def ratio(self, *_):
        return 1.0


class Words:
    def decode(self, ids):
        return "".join(f"<{i}>" for i in ids)


class Bench:
    """A scheduler with one document in place, with drafts or without."""

    def __init__(self, draft_tokens=6, **more) -> None:
        more.setdefault("n_slots", 8)
        self.runner = FakeRunner(block_tokens=8, chunk_tokens=16, draft_tokens=draft_tokens, **more)
        self.runner.watched_heads = [(0, 0)]
        self.scheduler = Scheduler(self.runner, prefill_rows=8)
        if self.scheduler.planner is not None:
            self.scheduler.planner.costs = Free()
        self.lookup = DocumentLookup(TOKENS)
        self.document = self.scheduler.run(self.runner.new_document, len(TOKENS))
        for first in range(0, len(TOKENS), 16):
            self.scheduler.prefill(self.document, TOKENS[first : first + 16]).result()
        self.shown: list[str] = []

    def ask(self, prompt=(1, 2, 3), max_new=50, stops=(), **more) -> Sequence:
        slot = self.scheduler.run(self.runner.new_tail)
        self.scheduler.run(self.runner.watch_tail, slot)
        planner = self.scheduler.planner
        drafter = Drafter([self.lookup], prompt, planner.rates) if planner else None
        writer = AnswerWriter(Detokenizer(Words()), StopStrings(stops), more.pop("emit", self.shown.append))
        sampler = Sampler(more.pop("sampling", Sampling()))
        sequence = Sequence(
            slot, self.document, [TOKENS[-1], *prompt], True, max_new, sampler, writer, drafter=drafter, **more
        )
        self.scheduler.submit(sequence)
        return sequence

    def left(self, sequence):
        """The result, and what the sequence leaves: KV of its tail, and where its tokens looked."""
        result = sequence.done.result(60)
        run, slot, n = self.scheduler.run, sequence.slot, len(result.computed_ids)
        assert run(self.runner.tail_length, slot) == n
        looks = run(self.runner.tail_looks, slot, self.document, [1] * len(result.sampled_ids))
        blocks = run(self.runner.export_tail, slot, 0, n)
        run(self.runner.free_tail, slot)
        return result, [bytes(record) for block in blocks for record in block], looks


@pytest.fixture
def bench():
    made = []

    def make(*args, **more) -> Bench:
        made.append(Bench(*args, **more))
        return made[-1]

    yield make
    for one in made:
        one.scheduler.close()


def same(with_drafts, without):
    (one, kv, looks), (other, other_kv, other_looks) = with_drafts, without
    assert (one.sampled_ids, one.computed_ids) == (other.sampled_ids, other.computed_ids)
    assert (one.finish_reason, one.n_prefilled) == (other.finish_reason, other.n_prefilled)
    assert kv == other_kv
    for part, other_part in ((looks.document, other_looks.document), (looks.tail, other_looks.tail)):
        torch.testing.assert_close(part, other_part)
    assert (other.n_drafted, other.n_accepted) == (0, 0)
    assert other.n_steps == len(other.sampled_ids)
    return one


def both(bench, **more):
    """What the same question gives with drafts and without."""
    script, options = more.pop("script", QUOTES), more.pop("runner", {})
    benches = [bench(n, script=script, **options) for n in (6, 0)]
    found = [b.left(b.ask(**more)) for b in benches]
    assert benches[0].shown
    assert "".join(benches[0].shown) == "".join(benches[1].shown)
    return same(*found)


def test_quotes_take_fewer_steps_and_leave_the_same(bench):
    result = both(bench, max_new=len(QUOTES))
    assert result.sampled_ids == QUOTES
    assert result.n_accepted > 20
    assert result.n_steps <= len(QUOTES) - result.n_accepted
    assert result.n_drafted > result.n_accepted  # there were wrong ones too


@pytest.mark.parametrize("max_new", [1, 2, 3, 5, 8, 11, 13])
def test_no_more_than_asked_for_is_computed_or_drafted(bench, max_new):
    result = both(bench, max_new=max_new)
    assert (result.finish_reason, len(result.sampled_ids)) == ("length", max_new)
    assert result.n_drafted <= max(max_new - 3, 0)


@pytest.mark.parametrize("at", range(3, 13))
def test_an_end_token_in_the_middle_of_right_drafts_ends_it_there(bench, at):
    result = both(bench, end_ids=frozenset([QUOTES[at]]))
    assert (result.finish_reason, result.sampled_ids) == ("stop", QUOTES[: at + 1])
    assert result.computed_ids == [1, 2, 3, *QUOTES[:at]]


@pytest.mark.parametrize("at", range(4, 12))
def test_a_stop_string_in_the_middle_of_right_drafts_ends_it_there(bench, at):
    result = both(bench, stops=[f"{QUOTES[at - 1]}><{QUOTES[at]}"])
    assert (result.finish_reason, result.sampled_ids) == ("stop", QUOTES[: at + 1])


def test_an_answer_fills_its_tail_to_the_last_row(bench):
    result = both(bench, script=TOKENS[10:60], max_new=21, runner={"tail_tokens": 23})
    assert len(result.computed_ids) == 23
    assert result.n_accepted > 10


def test_a_prompt_of_another_is_fed_without_drafts_and_drafts_go_on_behind_it(bench):
    b, others = bench(script=TOKENS[10:90]), []

    def emit(text):  # on the engine's thread: the other comes when this one is under way, however slow the machine is
        b.shown.append(text)
        if len(b.shown) == 8:
            others.append(b.ask(list(range(30, 50)), max_new=4))

    one, *_ = b.left(b.ask(max_new=60, emit=emit))
    other, *_ = b.left(others[0])
    assert one.sampled_ids == TOKENS[10:70]
    assert other.sampled_ids == TOKENS[10:14]
    assert one.n_accepted > 20
    fed = [step for step in b.runner.forwards if len(step) == 2 and step[1] in (8, 5)]
    assert len(fed) == 3
    assert all(step[0] == 1 for step in fed)


def test_batches_give_what_each_gives_alone(bench):
    script, prompts = TOKENS[10:60], [[i + 1] * (3 * i + 1) for i in range(5)]
    with_drafts, without = bench(6, script=script), bench(0, script=script)
    asked = [with_drafts.ask(prompt, 20) for prompt in prompts]
    for sequence, prompt in zip(asked, prompts, strict=True):
        same(with_drafts.left(sequence), without.left(without.ask(prompt, 20)))


@pytest.mark.parametrize("at", range(8, 17))
def test_cancelling_ends_it_there_also_in_the_middle_of_right_drafts(bench, at):
    b, asked = bench(script=TOKENS[10:]), Future()

    def emit(text):
        b.shown.append(text)
        if len(b.shown) == at:
            b.scheduler.cancel(asked.result(60))

    asked.set_result(b.ask(max_new=80, emit=emit))
    result, *_ = b.left(asked.result())  # its tail is as long as its tokens say
    assert (result.finish_reason, result.sampled_ids) == ("cancelled", TOKENS[10 : 10 + at])
    assert result.n_accepted > 0
    assert b.shown == [f"<{token}>" for token in result.sampled_ids]


def test_broken_logits_behind_a_draft_that_is_wrong_are_nobodys(bench):
    b = bench(script=[*TOKENS[10:13], 255, 254, 1])
    b.runner.poisoned = {TOKENS[13]}
    result, *_ = b.left(b.ask(max_new=6))
    assert result.sampled_ids == [*TOKENS[10:13], 255, 254, 1]
    assert result.n_drafted > 0
    b.runner.poisoned = {TOKENS[12]}
    sequence = b.ask(max_new=6)
    with pytest.raises(NotFinite):
        sequence.done.result(60)


def test_counters_and_results_count_alike(bench):
    b = bench(script=QUOTES)
    results = [b.left(b.ask(max_new=30))[0] for _ in range(3)]
    counters = b.scheduler.counters
    assert counters.decoded_tokens == 90
    assert counters.drafted_tokens == sum(r.n_drafted for r in results)
    assert counters.accepted_tokens == sum(r.n_accepted for r in results) > 0


class Chains(FakeRunner):
    """Logits that follow from the last two tokens alone, over few tokens: what comes of drafts can be counted."""

    def __init__(self, **more) -> None:
        super().__init__(**more)
        self.table = np.random.default_rng(3).normal(0, 1.2, (8, 8, 8)).astype(np.float32)

    def _logits(self, document: FakeDocument, tail: FakeTail | None, token: int) -> torch.Tensor:
        before = self._rows.token_of(tail.rows, tail.n_tokens - 2)
        return torch.from_numpy(self.table[before % 8, token % 8].copy())


def chain_answers(draft_tokens, seeds, n_tokens):
    runner = Chains(block_tokens=8, chunk_tokens=16, draft_tokens=draft_tokens, n_slots=2, vocab_size=8)
    scheduler = Scheduler(runner)
    text = random.Random(1).choices(range(8), k=400)
    lookup, answers, n_drafted, n_accepted = DocumentLookup(text), [], 0, 0
    if scheduler.planner is not None:
        scheduler.planner.costs = Free()
    for seed in seeds:
        slot = scheduler.run(runner.new_tail)
        drafter = Drafter([lookup], [1, 2], Rates()) if draft_tokens else None
        sampler = Sampler(Sampling(temperature=1.0, top_p=0.95, seed=seed))
        sequence = Sequence(slot, None, [1, 2], False, n_tokens, sampler, drafter=drafter)
        scheduler.submit(sequence)
        result = sequence.done.result(60)
        answers.append(result.sampled_ids)
        n_drafted, n_accepted = n_drafted + result.n_drafted, n_accepted + result.n_accepted
        scheduler.run(runner.free_tail, slot)
    scheduler.close()
    return answers, n_drafted, n_accepted, runner.table


def test_the_same_seed_gives_the_same_tokens_with_drafts_and_without():
    with_drafts, n_drafted, n_accepted, _ = chain_answers(5, range(4), 60)
    without, *_ = chain_answers(0, range(4), 60)
    assert with_drafts == without
    assert n_drafted > n_accepted > 20


def test_sampled_tokens_are_distributed_as_the_model_says():
    """Pearson's chi-square over all pairs of tokens before: 1 of 1,000 right samplers would fail, with other seeds."""
    answers, n_drafted, n_accepted, table = chain_answers(3, range(100, 116), 120)
    assert n_drafted > n_accepted > 200
    seen = np.zeros((8, 8, 8))
    for answer in answers:
        for a, b, c in zip([2, *answer], answer, answer[1:], strict=False):
            seen[a, b, c] += 1
    chi2, freedom = chi_square(seen, table)
    assert freedom > 80
    assert chi2 < freedom + 3.09 * (2 * freedom) ** 0.5 + 6
    taken = seen[..., ::-1]  # the test sees what it is for: other tokens than the model's
    assert chi_square(taken, table)[0] > 3 * freedom


def chi_square(seen, table):
    total, freedom = 0.0, 0
    for a, b in np.ndindex(8, 8):
        p = nucleus(table[a, b], 0.95)
        expected = p * seen[a, b].sum()
        often = expected >= 5
        if often.sum() < 2:
            continue
        counts = np.append(seen[a, b][often], seen[a, b][~often].sum())
        wanted = np.append(expected[often], expected[~often].sum())
        counts, wanted = counts[wanted > 0], wanted[wanted > 0]
        total += ((counts - wanted) ** 2 / wanted).sum()
        freedom += len(wanted) - 1
    return total, freedom


def nucleus(logits, top_p):
    p = np.exp(logits[:8].astype(np.float64))
    p /= p.sum()
    order = np.argsort(-p)
    kept = np.cumsum(p[order]) - p[order] < top_p
    p[order[~kept]] = 0
    return p / p.sum()


@pytest.mark.parametrize(("temperature", "expected"), [(0.0, True), (0.7, False)])
@pytest.mark.parametrize("draft_tokens", [0, 6])
def test_only_a_greedy_answer_asks_for_no_more_than_the_best_tokens(bench, temperature, expected, draft_tokens):
    one, asked = bench(draft_tokens, script=QUOTES), []
    forward = one.runner.forward

    def spied(batch):
        asked.extend((len(rows.tokens), rows.only_best) for rows in batch)
        return forward(batch)

    one.runner.forward = spied
    one.left(one.ask(max_new=20, sampling=Sampling(temperature=temperature, seed=3)))
    prompt, *decoding = asked
    assert prompt[1] is False
    assert {only_best for _, only_best in decoding} == {expected}


def test_a_longer_document_at_the_address_of_one_that_is_gone_is_another_to_the_costs(monkeypatch):
    bench, named = Bench(), []
    planner = bench.scheduler.planner
    assert planner is not None
    monkeypatch.setattr(planner.costs, "record", lambda members, *more: named.append(members))
    bench.ask(max_new=3).done.result(10)
    bench.document.next_position += 1000  # the same object stands for one that Python made in its place
    bench.ask(max_new=3).done.result(10)
    bench.ask(max_new=3).done.result(10)
    assert len(set(named)) == 2
    bench.scheduler.close()
