"""What of a passage stands elsewhere too."""

import numpy as np
import torch

from service.engine.fetch.index import Look
from service.engine.fetch.recurring import MOST, join, recurring


def text(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_tokens_of_a_pair_that_stands_elsewhere_are_told_by_their_places():
    document = text(1, 2, 50, 51, 52, 3, 4, 5, 6, 50, 51, 52, 7)
    assert recurring([document], 0, 0, 5, known=[]) == [3, 4]


def test_a_pair_of_the_question_leads_nowhere_new():
    document = text(1, 2, 50, 51, 52, 3, 4, 5, 6, 50, 51, 52, 7)
    assert recurring([document], 0, 0, 5, known=[9, 50, 51, 9]) == [4]


def test_the_token_before_the_passage_belongs_to_its_first_pair():
    document = text(50, 51, 1, 2, 3, 50, 51)
    assert recurring([document], 0, 1, 4, known=[]) == [1]


def test_what_comes_again_only_within_the_passage_does_not_count():
    assert recurring([text(50, 51, 50, 51, 1, 2)], 0, 0, 4, known=[]) == []


def test_what_stands_everywhere_does_not_count():
    often = text(*[50, 51] * (MOST + 1), 1, 50, 51)
    assert recurring([often], 0, 0, 2, known=[]) == []
    assert recurring([text(50, 51, 1, *[50, 51, 2] * MOST)], 0, 0, 2, known=[]) == [1]


def test_other_documents_count():
    assert recurring([text(1, 2, 3), text(4, 50, 51), text(50, 51, 9)], 1, 0, 3, known=[]) == [2]


def test_a_passage_of_one_token_names_nothing():
    assert recurring([text(50)], 0, 0, 1, known=[]) == []
    assert recurring([text(50, 51)], 0, 1, 1, known=[]) == []


def looks(*figures):
    return [Look.of(torch.tensor(one)) for one in figures]


def test_what_is_found_for_names_counts_a_share_of_what_is_found_for_the_question():
    first, second = looks([8.0, 1.0], [0.0]), looks([0.0, 1.0], [2.0])
    assert [one.figures.tolist() for one in join(first, second, 0.5)] == [[8.0, 2.0], [4.0]]
    assert [one.figures.tolist() for one in join(first, looks([0.0, 0.0], [0.0]))] == [[8.0, 1.0], [0.0]]
