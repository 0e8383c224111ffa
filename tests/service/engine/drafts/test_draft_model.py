"""What the draft model is fed, in how few forwards, and when it is asked at all."""

import random

import pytest
from torch import Tensor

from service.engine.drafts.drafter import Drafter
from service.engine.drafts.follower import Follower, ModelRates
from service.engine.drafts.leader import Leader
from service.engine.drafts.lookup import DocumentLookup
from service.engine.drafts.model import FEED_ROWS, DraftModel, Prices
from service.engine.drafts.planner import DraftPlanner
from service.engine.protocol import Best
from tests.service.engine.draft_runner import Costs, Successor

TEXT = list(range(100, 300))
FREE = Prices()


class Recording(Successor):
    """Keeps the tokens of each forward, by slot."""

    def __init__(self, *args, **more) -> None:
        super().__init__(*args, **more)
        self.fed: list[dict[int, list[int]]] = []

    def forward(self, batch):
        self.fed.append({rows.slot: list(rows.tokens) for rows in batch})
        return super().forward(batch)


def follower(model, said=(1, 2, 100), room=500):
    one = Follower(model.runner.new_tail(), None, model.rates, room)
    one.begin(list(said))
    return one


def push(one, tokens):
    for token in tokens:
        one.push(token)


@pytest.fixture
def model():
    return DraftModel(Recording(TEXT, n_slots=8), 512)


def test_what_was_accepted_is_fed_with_the_first_guess(model):
    one, fed = follower(model), model.runner.fed
    assert model.guess([(one, 3)], FREE) == [[101, 102, 103]]
    assert fed == [{0: [1, 2, 100]}, {0: [101]}, {0: [102]}]
    push(one, [101, 102, 103, 104])  # all were right: the last one is in no row yet
    fed.clear()
    assert model.guess([(one, 2)], FREE) == [[105, 106]]
    assert fed == [{0: [103, 104]}, {0: [105]}]
    push(one, [105, 150])  # the second was wrong, and in no row
    fed.clear()
    assert model.guess([(one, 3)], FREE) == [[151, 152, 153]]
    assert fed == [{0: [150]}, {0: [151]}, {0: [152]}]
    push(one, [180])  # the first was wrong: two rows go
    fed.clear()
    assert model.guess([(one, 1)], FREE) == [[181]]
    assert fed == [{0: [180]}]
    assert model.runner.tail_length(0) == len(one.rows) == len([1, 2, *range(100, 106), 150, 180])


def test_what_it_was_not_asked_about_is_fed_at_once(model):
    one = follower(model)
    push(one, range(101, 120))
    assert model.guess([(one, 2)], FREE) == [[120, 121]]
    assert [len(step[0]) for step in model.runner.fed] == [22, 1]
    push(one, [120])  # what is known of it is in its rows: the last one is computed anew, for its logits
    model.runner.fed.clear()
    assert model.guess([(one, 1)], FREE) == [[121]]
    assert model.runner.fed == [{0: [120]}]


def test_a_long_session_is_fed_in_pieces_and_guesses_follow(model):
    said = [*([7] * (2 * FEED_ROWS)), 100]
    one = follower(model, said, room=1000)
    assert model.guess([(one, 2)], FREE) == [[]]
    assert model.guess([(one, 2)], FREE) == [[]]
    assert model.guess([(one, 2)], FREE) == [[101, 102]]
    assert [len(step[0]) for step in model.runner.fed] == [FEED_ROWS, FEED_ROWS, 1, 1]
    assert model.counters.prefilled_tokens == len(said)


def test_all_that_guess_share_a_forward_for_each_place(model):
    several = [follower(model, [1, 2 + i, 100 + 10 * i]) for i in range(3)]
    wanted = list(zip(several, (3, 1, 2), strict=True))
    assert model.guess(wanted, FREE) == [[101, 102, 103], [111], [121, 122]]
    assert [sorted(step) for step in model.runner.fed] == [[0, 1, 2], [0, 2], [0]]
    assert model.counters.steps == 3


def test_a_tail_that_another_question_follows_keeps_what_both_begin_with(model):
    one = follower(model, [1, 2, 3, 4, 100])
    model.guess([(one, 3)], FREE)
    again = Follower(one.slot, None, model.rates, 500, one.rows)
    again.begin([1, 2, 3, 9, 110])
    model.runner.fed.clear()
    assert model.guess([(again, 1)], FREE) == [[111]]
    assert model.runner.fed == [{0: [9, 110]}]


def test_it_guesses_no_further_than_its_tail_has_room_and_fails_for_one_answer_alone(model):
    one = follower(model, room=5)
    assert model.guess([(one, 6)], FREE) == [[101, 102]]
    push(one, [101, 102, 103])
    assert model.guess([(one, 6)], FREE) == [[]]
    other = follower(model)
    model.runner.fails = True
    assert model.guess([(other, 3)], FREE) == [[]]
    assert (other.alive, one.alive) == (False, True)
    model.runner.lost = True
    with pytest.raises(RuntimeError):
        model.guess([(follower_of(model.runner, model), 1)], FREE)


def test_tokens_that_one_of_the_models_has_not_are_neither_fed_nor_guessed():
    model = DraftModel(Recording([100, 101, 500], n_slots=8), 480)
    one = follower(model)
    [guesses] = model.guess([(one, 4)], FREE)
    assert guesses[0] == 101
    assert max(guesses) < 480
    push(one, [490])  # of the main model alone
    model.runner.fed.clear()
    assert model.guess([(one, 4)], FREE) == [[]]
    assert (model.runner.fed, one.alive) == ([], False)


def follower_of(runner, model):
    one = Follower(3, None, ModelRates(model.rates), 100)
    one.begin([1])
    assert not runner.usable()
    return one


def test_guessing_ends_where_it_is_not_sure():
    model = DraftModel(Recording(TEXT, sure=0.0), 512)  # its logits are random: no token stands out
    one = follower(model)
    [guesses] = model.guess([(one, 6)], Prices(forward=0.4, row=0.05))
    assert len(guesses) <= 2
    assert len(model.runner.fed) <= 2


class Bench:
    """A planner with a draft model, whose forward takes `forward_s` of a step."""

    def __init__(self, forward_s=0.1, per_row=0.02, documents=()) -> None:
        self.model = DraftModel(Recording(TEXT, tail_tokens=4096), 512)
        self.model.forward_s = lambda n, main_s: forward_s * main_s
        self.planner = DraftPlanner(7)
        self.planner.costs = Costs(per_row)
        self.planner.leader = Leader(self.model)
        self.follower = Follower(self.model.runner.new_tail(), None, self.model.rates, 4000)
        self.drafter = Drafter(documents, [1, 2], self.planner.rates, lambda: self.follower)

    def run(self, answer, at_most=7):
        """Drafts of each step of an answer."""
        self.drafter.push(answer[0])
        at, taken = 1, []
        while at < len(answer):
            [drafts] = self.planner.plan([self.drafter], [min(at_most, len(answer) - at)])
            taken.append(len(drafts))
            for token, draft in zip(answer[at:], [*drafts, None], strict=False):
                self.drafter.push(token)
                at += 1
                if token != draft:
                    break
        return taken


def other(n_tokens, seed=1):
    """An answer that is neither in the text nor its own repetition."""
    return random.Random(seed).choices(range(300, 480), k=n_tokens)


def test_right_guesses_are_made_further_and_wrong_ones_are_left_out():
    right = Bench().run(TEXT[:150])
    assert len(right) < 50
    assert max(right[-5:-1]) >= 5
    bench = Bench()
    wrong = bench.run(other(600))
    assert sum(wrong[:20]) > 0
    assert sum(wrong[-200:]) <= 8
    assert len(wrong) == 599
    fed = sum(len(step[0]) for step in bench.model.runner.fed)
    assert fed <= 700


def test_a_draft_model_that_takes_as_long_as_the_main_one_is_not_asked():
    bench = Bench(forward_s=1.0, per_row=0.1)
    taken = bench.run(TEXT[:190])
    assert sum(taken) < 20


def test_it_is_asked_again_now_and_then():
    bench = Bench(forward_s=0.1)
    bench.run(other(800))
    asked = len(bench.model.runner.fed)
    bench.run(other(800, seed=2))
    assert 1 <= len(bench.model.runner.fed) - asked < 80


def test_what_is_looked_up_comes_first():
    bench = Bench(documents=[DocumentLookup(TEXT)], forward_s=0.3)
    for _ in range(300):
        for length in range(2, 40):
            bench.planner.rates.count(length, is_right=True)
    taken = bench.run(TEXT[:120])
    assert max(taken) == 7
    assert len(bench.model.runner.fed) < 15
    assert not bench.drafter.is_led


def test_a_step_without_drafts_is_measured_first():
    bench = Bench()
    bench.planner.costs.has_base = lambda n: False
    bench.drafter.push(100)
    assert bench.planner.plan([bench.drafter], [5]) == [[]]
    assert bench.model.runner.fed == []


def test_without_a_follower_the_planner_does_as_without_a_draft_model():
    bench = Bench(documents=[DocumentLookup(TEXT)])
    bench.follower = None
    for token in TEXT[:6]:
        bench.drafter.push(token)
    plain = DraftPlanner(7)
    plain.costs = Costs(0.02)
    drafter = Drafter([DocumentLookup(TEXT)], [1, 2], plain.rates)
    for token in TEXT[:6]:
        drafter.push(token)
    assert bench.planner.plan([bench.drafter], [7]) == plain.plan([drafter], [7]) != [[]]


class OnCard(Successor):
    """Gives tokens and probabilities in place of logits, as a card does; of `broken` ones none that are numbers."""

    broken = False

    def forward(self, batch):
        assert all(rows.only_best and rows.how_sure for rows in batch)
        found = [logits.softmax(1).max(1) for logits in super().forward(batch)]
        return [
            [
                Best(token, not self.broken, sure)
                for sure, token in zip(*map(list, map(Tensor.tolist, best)), strict=True)
            ]
            for best in found
        ]


def test_what_a_card_finds_is_taken_as_logits_are():
    model = DraftModel(OnCard(TEXT, n_slots=8), 104)
    one = follower(model)
    assert model.guess([(one, 9)], FREE) == [[101, 102, 103]]  # the next one is no token of the main model
    assert one.alive
    model.runner.broken = True
    other = follower(model)
    assert model.guess([(other, 2)], FREE) == [[]]
    assert not other.alive


def test_what_its_forwards_and_further_rows_take_is_measured(model, monkeypatch):
    """A forward of one row takes 0.5 s here, and each further row 0.01 s."""
    clock = [0.0]
    forward = model.runner.forward

    def timed(batch):
        n_rows = sum(len(rows.tokens) for rows in batch)
        clock[0] += 0.5 if n_rows < 9 else 0.5 + 0.01 * (n_rows - 1)
        return forward(batch)

    model.runner.forward = timed
    monkeypatch.setattr("service.engine.drafts.model.monotonic", lambda: clock[0])
    assert model.forward_s(1, 1.0) == pytest.approx(0.15)
    assert model.feed_s(10, 0.15) == pytest.approx(0.15)
    one = follower(model)
    model.guess([(one, 5)], FREE)
    assert model.forward_s(1, 1.0) == model.forward_s(3, 1.0) == pytest.approx(0.5)
    for _ in range(4):
        push(one, range(300, 340))
        model.guess([(one, 1)], FREE)
    assert model.feed_s(10, 0.5) == pytest.approx(0.1)
