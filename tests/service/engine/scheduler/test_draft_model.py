"""A draft model in the scheduler: sampled answers with a seed are those without it; a lost device ends the thread."""

import pytest

from service.engine.drafts.drafter import Drafter
from service.engine.drafts.follower import Follower
from service.engine.drafts.rates import Rates
from service.engine.messages import Sampling
from service.engine.scheduler.errors import SchedulerClosed
from service.engine.scheduler.loop import Scheduler
from service.engine.scheduler.sampling import Sampler
from service.engine.scheduler.sequence import Sequence
from tests.service.engine.draft_runner import Costs
from tests.service.engine.scheduler.test_drafts import Chains

SIZES = {"block_tokens": 8, "chunk_tokens": 16, "n_slots": 4, "vocab_size": 8}
N_TOKENS = 60


class Bench:
    """Both models are of a kind whose next token follows from the last two."""

    def __init__(self, *, drafts: bool) -> None:
        self.main = Chains(draft_tokens=5, **SIZES)
        self.draft = Chains(**SIZES) if drafts else None
        self.scheduler = Scheduler(self.main, draft=self.draft)
        self.scheduler.planner.costs = Costs()

    def ask(self, seed, temperature=1.0) -> Sequence:
        run, follow = self.scheduler.run, None
        if self.draft is not None:
            drafting = self.scheduler.drafting
            follower = Follower(run(self.draft.new_tail), None, drafting.rates, 500)
            follow = lambda: follower  # noqa: E731
        drafter = Drafter([], [1, 2], Rates(), follow)
        sampler = Sampler(Sampling(temperature=temperature, top_p=0.95, seed=seed))
        sequence = Sequence(run(self.main.new_tail), None, [1, 2], False, N_TOKENS, sampler, drafter=drafter)
        self.scheduler.submit(sequence)
        return sequence


@pytest.fixture
def bench():
    made = []

    def make(**more) -> Bench:
        made.append(Bench(**more))
        return made[-1]

    yield make
    for one in made:
        one.scheduler.close()


def test_sampled_answers_with_a_seed_are_the_same_also_together(bench):
    told = []
    for drafts in (True, False):
        b = bench(drafts=drafts)
        asked = [b.ask(seed) for seed in range(3)]
        told.append([sequence.done.result(60).sampled_ids for sequence in asked])
        if drafts:
            counters = b.scheduler.drafting.counters
            assert counters.guessed_tokens > counters.accepted_tokens > 20
            assert counters.accepted_tokens <= b.scheduler.counters.accepted_tokens
            assert counters.steps < counters.guessed_tokens
    assert told[0] == told[1]


def test_a_greedy_answer_of_the_same_model_takes_few_steps(bench):
    b = bench(drafts=True)
    result = b.ask(0, temperature=0.0).done.result(60)
    assert result.n_steps < N_TOKENS / 3
    assert result.n_accepted == result.n_drafted
    assert b.scheduler.counters.prefilled_tokens == 2
    assert b.scheduler.drafting.counters.prefilled_tokens == 3  # the question and the token that was there then


def test_a_draft_model_whose_device_is_lost_ends_the_thread(bench):
    b = bench(drafts=True)
    forward = b.draft.forward

    def lost(batch):
        b.draft.lost = len(b.draft.forwards) > 3
        return forward(batch)

    b.draft.forward = lost
    with pytest.raises(SchedulerClosed):
        b.ask(0).done.result(60)
    b.scheduler.join()
    assert not b.scheduler.alive
