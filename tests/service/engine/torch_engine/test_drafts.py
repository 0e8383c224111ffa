"""Drafts through the torch engine: greedy answers of a tiny model, and the KV they leave, as without."""

import pytest
import torch

from cache_store.layout import KVType
from service.engine.drafts.drafter import Drafter
from service.engine.drafts.lookup import DocumentLookup
from service.engine.messages import Sampling
from service.engine.protocol import Rows
from service.engine.scheduler.loop import Scheduler
from service.engine.scheduler.sampling import Sampler
from service.engine.scheduler.sequence import Sequence

N_TOKENS = 40


class Free:
    def record(self, *_):
        pass

    def has_base(self, _):
        return True

    def ratio(self, *_):
        return 1.0


@pytest.fixture
def start():
    made = []

    def make(runner):
        made.append(Scheduler(runner))
        made[-1].planner.costs = Free()
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()


def answer(scheduler, runner, document, prompt, guesses):
    """The result, and the logits of the token behind it."""
    slot = scheduler.run(runner.new_tail)
    drafter = Drafter([DocumentLookup(guesses)], prompt, scheduler.planner.rates) if guesses else None
    sequence = Sequence(slot, document, prompt, False, N_TOKENS, Sampler(Sampling()), drafter=drafter)
    scheduler.submit(sequence)
    result = sequence.done.result(60)
    assert scheduler.run(runner.tail_length, slot) == len(result.computed_ids)
    logits = scheduler.run(runner.forward, [Rows(slot, document, result.sampled_ids[-1:])])[0]
    scheduler.run(runner.free_tail, slot)
    return result, logits


@pytest.mark.parametrize("kv_type", [KVType.FP16, KVType.K8V4])
def test_greedy_answers_and_what_they_leave_are_the_same(load_runner, token_ids, start, kv_type):
    runner = load_runner(kv_type, n_slots=2)  # one of its own: a scheduler's thread makes tails in inference mode
    scheduler = start(runner)
    document = scheduler.run(runner.new_document, 300)
    scheduler.prefill(document, token_ids(300)).result()
    for seed in range(3):
        prompt = token_ids(12, seed=seed)
        plain, logits = answer(scheduler, runner, document, prompt, [])
        wrong = [token if i % 9 else 3 + i for i, token in enumerate(plain.sampled_ids)]
        drafted, drafted_logits = answer(scheduler, runner, document, prompt, wrong)
        assert drafted.sampled_ids == plain.sampled_ids
        assert drafted.computed_ids == plain.computed_ids
        assert drafted.n_accepted > 10
        assert drafted.n_steps < N_TOKENS - 10
        assert plain.n_steps == N_TOKENS
        torch.testing.assert_close(drafted_logits, logits, rtol=1e-3, atol=1e-3)
    scheduler.run(runner.free_document, document)
