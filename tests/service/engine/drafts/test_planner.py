"""How many drafts a step takes, from chances and measured costs."""

from itertools import pairwise

import pytest

from service.engine.drafts.costs import StepCosts
from service.engine.drafts.drafter import Drafter
from service.engine.drafts.lookup import DocumentLookup
from service.engine.drafts.planner import MOST_SLOWER, TRIED_EVERY, DraftPlanner
from service.engine.drafts.rates import Rates

TEXT = list(range(100, 400))


def drafter(rates, answer=(110, 111, 112), said=()):
    made = Drafter([DocumentLookup(TEXT)], said, rates)
    for token in answer:
        made.push(token)
    return made


def learned(rates, is_right, n=400):
    for _ in range(n):
        for length in range(2, 40):
            rates.count(length, is_right=is_right)
    return rates


def measured(planner, n, rows, ratio):
    members = tuple(range(n))
    for _ in range(60):
        planner.costs.record(members, n, 0.01)
        planner.costs.record(members, rows, 0.01 * ratio)


def test_guesses_follow_the_document_and_begin_anew_after_a_wrong_one():
    one = drafter(Rates())
    assert one.draft(3) == [113, 114, 115]
    one.push(113)
    assert one.draft(2) == [114, 115]
    one.push(7)
    assert (one.draft(2), one.chances(4)) == ([], [])
    one.push(200)
    one.push(201)
    assert one.draft(2) == [202, 203]
    for token in range(202, 400):
        one.push(token)
    assert one.draft(2) == []


def test_nothing_is_guessed_from_a_prompt_alone_and_the_session_is_looked_through():
    rates = Rates()
    one = drafter(rates, (), said=[1, 2, 3, 4, 1, 2])
    assert one.draft(1) == []
    one.push(2)
    assert one.draft(1) == []
    one.push(3)
    assert one.draft(3) == [4, 1, 2]


def test_chances_multiply_and_are_learned_by_a_sequence_before_the_process():
    rates = Rates()
    one = drafter(rates)
    chances = one.chances(5)
    assert len(chances) == 5
    assert all(a > b > 0 for a, b in pairwise(chances))
    for _ in range(10):
        for token in (150, 151, 152, 7):
            one.push(token)
    one.push(150), one.push(151)
    assert one.chances(1)[0] > 0.7 > rates.chance(3)
    assert drafter(rates, (110, 111)).chances(1)[0] < one.chances(1)[0]


def test_drafts_are_taken_as_long_as_they_pay():
    planner = DraftPlanner(7)
    learned(planner.rates, True)
    assert [len(drafts) for drafts in planner.plan([drafter(planner.rates)], [20])] == [7]
    assert [len(drafts) for drafts in planner.plan([drafter(planner.rates)], [2])] == [2]
    assert planner.plan([drafter(planner.rates)], [0]) == [[]]
    for rows in range(2, 9):
        measured(planner, 1, rows, 1.0 if rows < 5 else 5.0)
    assert planner.plan([drafter(planner.rates)], [20]) == [[113, 114, 115]]


def test_none_are_taken_where_guesses_are_wrong_or_rows_cost_as_much_as_steps():
    planner = DraftPlanner(7)
    learned(planner.rates, False)
    assert planner.plan([drafter(planner.rates)], [20]) == [[]]
    planner = DraftPlanner(7)
    learned(planner.rates, True)
    for rows in range(2, 9):
        measured(planner, 1, rows, rows)
    assert planner.plan([drafter(planner.rates)], [20]) == [[]]


def test_what_did_not_pay_is_tried_again_now_and_then():
    planner = DraftPlanner(3)
    learned(planner.rates, True)
    for rows in range(2, 5):
        measured(planner, 1, rows, rows)
    one = drafter(planner.rates)
    taken = [len(planner.plan([one], [20])[0]) for _ in range(2 * TRIED_EVERY)]
    assert (taken.count(3), taken.count(0)) == (2, 2 * TRIED_EVERY - 2)


def test_who_has_no_drafts_does_not_wait_long_for_those_of_others():
    planner = DraftPlanner(7)
    learned(planner.rates, True)
    for rows in range(3, 10):
        measured(planner, 2, rows, 1 + 0.2 * (rows - 2))
    drafts = planner.plan([drafter(planner.rates), None], [20, 20])
    assert (len(drafts[0]), drafts[1]) == (2, [])
    assert planner.costs.ratio(2, 4) <= MOST_SLOWER < planner.costs.ratio(2, 5)


def test_costs_are_found_out_though_somebody_has_drafts_at_every_step():
    planner = DraftPlanner(7)
    learned(planner.rates, True)
    quoting, taken = [drafter(planner.rates), drafter(planner.rates)], []
    for _ in range(20):
        n_drafts = sum(map(len, planner.plan(quoting, [20, 20])))
        planner.costs.record((1, 1), 2 + n_drafts, 0.01 * (1 + 0.5 * n_drafts))
        taken.append(n_drafts)
    assert taken[0] == 0 < taken[1]  # a step without first
    assert taken[-10:] == [0] * 10
    assert sum(map(len, planner.plan([*quoting, None], [20] * 3))) == 0  # others in the step: once more
    planner.costs.record((1, 1, 2), 3, 0.01)
    assert sum(map(len, planner.plan([*quoting, None], [20] * 3))) > 0


def test_what_a_step_takes_without_drafts_is_measured_again_after_many_with():
    planner = DraftPlanner(3)
    learned(planner.rates, True)
    quoting, taken = [drafter(planner.rates), None], []
    for _ in range(250):
        n_drafts = sum(map(len, planner.plan(quoting, [20, 20])))
        planner.costs.record((1, 1), 2 + n_drafts, 0.01)
        taken.append(n_drafts)
    assert (taken.count(0), taken.count(3)) == (3, 247)
    assert taken[0] == taken[101] == taken[202] == 0


def test_all_drafts_of_a_step_are_bounded_and_the_likeliest_are_taken():
    planner = DraftPlanner(7, most_rows=10)
    learned(planner.rates, True)
    sure, unsure = drafter(planner.rates), drafter(planner.rates)
    for i in range(30):
        for token in (150, 151, 152, 1000 + i):
            unsure.push(token)
    unsure.push(150), unsure.push(151)
    planner.costs.record((1, 1), 2, 0.01)
    assert list(map(len, planner.plan([unsure, sure], [20, 20]))) == [1, 7]


def test_costs_are_compared_with_steps_of_the_same_sequences_only():
    costs = StepCosts()
    costs.record((1,), 1, 0.010)
    costs.record((2,), 4, 0.500)  # of another document: nothing to compare it with
    assert costs.ratio(1, 4) == pytest.approx(1.15)
    costs.record((2,), 1, 0.100)
    costs.record((2,), 4, 0.900)  # its first one
    assert costs.ratio(1, 4) == pytest.approx(1.15)
    for seconds in (0.200, 0.200, 9.0, 0.200, 0.200):  # one was held up
        costs.record((2,), 4, seconds)
    assert costs.ratio(1, 4) == pytest.approx(2.0)
    assert costs.ratio(1, 1) == 1
    assert 1 < costs.ratio(1, 2) < costs.ratio(1, 3) < 2 < costs.ratio(1, 6)
    assert costs.ratio(2, 4) == pytest.approx(1.1)
