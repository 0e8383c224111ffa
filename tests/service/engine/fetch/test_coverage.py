import torch

from service.engine.fetch.coverage import Coverage, both
from service.engine.fetch.index import Look


def look(places, rows, n_spans=8):
    at, given = torch.tensor(places), torch.tensor(rows)
    return Look(torch.zeros(n_spans).index_put((at,), given.sum(0)), at, given)


def test_what_comes_first_adds_its_figure():
    coverage = Coverage([look([3, 5], [[0.5, 0.25], [0.25, 0.5]])])
    assert coverage.gain(0, 3) == 0.75


def test_a_span_adds_what_its_rows_had_not_from_any_before():
    coverage = Coverage([look([3, 5], [[0.5, 0.25], [0.25, 0.5]]), look([0], [[0.625], [0.0]])])
    coverage.take(0, 3 * 16, 4 * 16)
    assert coverage.gain(0, 3) == 0.0
    assert coverage.gain(0, 5) == 0.25
    assert coverage.gain(1, 0) == 0.125


def test_all_spans_of_what_was_taken_count():
    coverage = Coverage([look([2, 3, 5], [[0.125, 0.5, 0.5], [0.5, 0.0, 0.75]])])
    coverage.take(0, 2 * 16 + 5, 3 * 16 + 1)
    assert coverage.gain(0, 5) == 0.25


def test_nothing_is_said_of_a_span_whose_rows_are_not_known():
    assert Coverage([Look.of(torch.ones(4))]).gain(0, 2) == 0.0


def test_two_looks_are_one_with_the_rows_of_both():
    joined = both(look([5, 3], [[0.5, 0.25]]), look([3, 7], [[1.0, 0.5], [0.0, 0.5]]), 0.5)
    assert joined.places.tolist() == [3, 5, 7]
    assert joined.rows.tolist() == [[0.25, 0.5, 0.0], [0.5, 0.0, 0.25], [0.0, 0.0, 0.25]]
    assert joined.figures.tolist() == [0.0, 0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.5]
