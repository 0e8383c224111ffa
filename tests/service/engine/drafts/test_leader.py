"""The draft model for several answers of a step: what its guesses may take of the others' time."""

import random
from dataclasses import dataclass, field

import pytest

from service.engine.drafts.costs import StepCosts
from service.engine.drafts.drafter import Drafter
from service.engine.drafts.follower import Follower
from service.engine.drafts.leader import Leader
from service.engine.drafts.lookup import DocumentLookup
from service.engine.drafts.model import FEED_ROWS, LEAST_FED, SMALL, DraftModel, shares
from service.engine.drafts.planner import MOST_SLOWER, DraftPlanner
from tests.service.engine.draft_runner import Costs, Successor

TEXT = list(range(100, 300))
BASE_S = 0.01


@dataclass
class Step:
    n_rows: int
    seconds: float
    fed: list[int]
    """Rows of each forward of the draft model."""
    led: list[int]
    """Answers of which the draft model guessed."""
    drafts: list[list[int]] = field(default_factory=list)


class Timed(Successor):
    """Notes how many rows each forward has."""

    def __init__(self, *args, **more) -> None:
        super().__init__(*args, **more)
        self.fed: list[int] = []

    def forward(self, batch):
        self.fed.append(sum(len(rows.tokens) for rows in batch))
        return super().forward(batch)


class Answers:
    """Several in each step, which takes `per_row` of one without drafts more for each draft; a forward of the draft
    model takes `forward`, and `per_fed` for each further row."""

    def __init__(
        self, n, most_rows=24, forward=0.1, per_row=0.02, per_fed=0.005, said=(1, 2), documents=(TEXT,)
    ) -> None:
        self.model = DraftModel(Timed(TEXT, n_slots=n, tail_tokens=8192), 512)
        self.model.forward_s = lambda _, main_s: forward * main_s
        self.model.feed_s = lambda n_rows, forward_s: n_rows * per_fed * BASE_S
        self.forward, self.per_row, self.per_fed = forward, per_row, per_fed
        self.planner = DraftPlanner(7, most_rows)
        self.planner.costs = StepCosts()
        self.planner.leader = Leader(self.model)
        self.drafters = [self._drafter(said, documents) for _ in range(n)]
        self.followers = [one.follower for one in self.drafters]
        self.planner.costs.record((0,) * n, n, BASE_S)

    def _drafter(self, said, documents):
        one = Follower(self.model.runner.new_tail(), None, self.model.rates, 8000)
        return Drafter([DocumentLookup(one) for one in documents], said, self.planner.rates, lambda: one)

    def step(self, tokens) -> Step:
        """Every answer goes on with its next token, whatever was guessed."""
        for drafter, token in zip(self.drafters, tokens, strict=True):
            drafter.push(token)
        fed, n = self.model.runner.fed, len(self.drafters)
        fed.clear()
        drafts = self.planner.plan(self.drafters, [20] * n)
        n_rows = n + sum(map(len, drafts))
        main = 1 + self.per_row * (n_rows - n)
        self.planner.costs.record((0,) * n, n_rows, main * BASE_S)
        seconds = (main + sum(self.forward + self.per_fed * max(rows - n, 0) for rows in fed)) * BASE_S
        return Step(n_rows, seconds, list(fed), [i for i, one in enumerate(self.drafters) if one.is_led], drafts)

    def run(self, n_steps, quoting=()) -> list[Step]:
        """Those of `quoting` quote the text, the others say what nobody guesses."""
        source, n = random.Random(1), len(self.drafters)
        return [
            self.step([TEXT[at % 190] if i in quoting else source.randrange(300, 480) for i in range(n)])
            for at in range(n_steps)
        ]


def never_right(answers):
    """What the process knows of the draft model: its guesses are wrong."""
    for _ in range(300):
        for place in range(7):
            answers.model.rates.places.count(place, is_right=False)
    return answers


@pytest.mark.parametrize("n", [1, 2, 8])
def test_all_probes_together_take_their_share_and_every_answer_has_some(n):
    answers = never_right(Answers(n))
    steps = answers.run(3000)
    probes = [step for step in steps if step.fed]
    lost = sum(step.seconds for step in steps) - BASE_S * len(steps)
    assert len(probes) > 20
    assert lost <= 0.02 * BASE_S * len(steps)
    assert {i for step in probes for i in step.led} == set(range(n))
    assert all(len(step.led) <= 1 for step in probes)


def test_a_probe_has_no_row_where_a_step_has_none_left():
    steps = never_right(Answers(4, most_rows=4)).run(1000)
    assert {step.n_rows for step in steps} == {4}
    assert not any(step.fed for step in steps)
    steps = never_right(Answers(4, most_rows=5)).run(1000)
    assert {step.n_rows for step in steps} == {4, 5}


def test_others_do_not_wait_long_for_a_probe():
    assert not any(step.fed for step in never_right(Answers(2, forward=0.6)).run(1000))
    assert any(step.fed for step in never_right(Answers(1, forward=0.6)).run(1000))  # nobody waits


def test_the_row_of_a_probe_is_in_its_price():
    cheap = sum(bool(step.led) for step in never_right(Answers(8, per_row=0.0, per_fed=0.001)).run(2000))
    dear = sum(bool(step.led) for step in never_right(Answers(8, per_row=0.3, per_fed=0.001)).run(2000))
    assert 0 < dear < 0.5 * cheap


def test_what_others_looked_up_stays_in_the_step_of_a_probe():
    answers = never_right(Answers(3, per_row=0.01, most_rows=9))
    for _ in range(300):
        for length in range(2, 40):
            answers.planner.rates.count(length, is_right=True)
    steps = answers.run(1000, quoting=(0,))
    probes = [step for step in steps if step.led]
    assert probes
    assert max(step.n_rows for step in steps) == 9
    for step in probes:
        assert step.led in ([1], [2])
        assert len(step.drafts[0]) >= 5 or step.n_rows < 9
        assert step.seconds <= MOST_SLOWER * BASE_S
    assert sum(len(step.drafts[0]) for step in probes) >= 4 * len(probes)


def always_right(answers):
    for _ in range(300):
        for place in range(7):
            answers.model.rates.places.count(place, is_right=True)
    return answers


def waited(step):
    return step.seconds / BASE_S


SESSION = [7] * 500


@pytest.mark.parametrize("n", [1, 2, 8, 20])
def test_what_was_said_is_fed_to_all_within_the_rows_of_a_step_and_the_time_that_others_wait(n):
    answers = always_right(Answers(n, 4 * n, per_row=0.005, per_fed=0.001, said=SESSION, documents=()))
    answers.planner.costs = Costs(0.005)  # as it is once rows are measured
    answers.planner.costs.base_s = BASE_S
    steps = answers.run(150, quoting=range(n))
    assert max(sum(step.fed[:1]) for step in steps) <= FEED_ROWS
    assert {i for step in steps for i in step.led} == set(range(n))
    if n > 1:
        assert max(map(waited, steps)) <= MOST_SLOWER
    assert sum(sum(step.fed[:1]) for step in steps[:20]) > min(n, 4) * 450


def test_what_takes_long_to_feed_is_fed_in_pieces_and_all_are_once():
    answers = always_right(Answers(4, per_fed=0.03, said=SESSION[:100], documents=()))
    steps = answers.run(150, quoting=range(4))
    assert max(step.fed[0] for step in steps if step.fed) <= LEAST_FED + 3 * SMALL
    assert {i for step in steps[:40] for i in step.led} == set(range(4))


def test_an_answer_that_is_fed_keeps_what_is_looked_up():
    answers = always_right(Answers(2, per_fed=0.001, per_row=0.01, said=SESSION))
    steps = answers.run(8, quoting=(0, 1))
    fed = [step for step in steps if step.fed and not step.led]
    assert len(fed) >= 2
    assert all(of_one for step in fed[2:] for of_one in step.drafts)


def test_rows_are_shared_by_those_that_want_them():
    assert shares([3, 1, 5], 256) == [3, 1, 5]
    assert shares([500, 4, 500], 256) == [126, 4, 126]
    assert shares([500] * 4, 20) == [16, 4, 0, 0]
    assert sum(shares([300] * 40, 256)) == 256
