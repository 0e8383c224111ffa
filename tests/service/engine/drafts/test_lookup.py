"""Places where tokens stood before: against a search through all of them."""

import random

import numpy as np
import pytest

from service.engine.drafts.lookup import COMPARED, LONGEST, SHORTEST, DocumentLookup, History


def agreeing(tokens, place, context):
    n = 0
    while n < min(len(context), place, COMPARED) and tokens[place - 1 - n] == context[-1 - n]:
        n += 1
    return n


def longest(tokens, context):
    return max((agreeing(tokens, place, context) for place in range(1, len(tokens))), default=0)


def test_the_longest_match_is_found_wherever_it_is():
    random.seed(5)
    for vocab in (3, 12, 200_000):  # the last has many tokens of the same 16 bits
        tokens = [random.randrange(vocab) * (65_536 if vocab > 100 else 1) % 200_000 for _ in range(300)]
        lookup = DocumentLookup(tokens)
        for _ in range(60):
            at = random.randrange(2, len(tokens))
            context = [random.randrange(vocab) for _ in range(3)] + tokens[max(at - random.randrange(2, 9), 0) : at]
            expected, found = longest(tokens, context), lookup.find(context, None)
            if found is None:
                assert expected < SHORTEST or vocab > 100
                continue
            place, length = found
            assert agreeing(tokens, place, context) == length >= SHORTEST
            if vocab == 12:  # few enough places that all are compared
                assert length == expected


def test_a_document_that_ends_with_the_context_gives_no_guess_behind_its_end():
    assert DocumentLookup([1, 2, 3, 4]).find([3, 4], None) is None
    assert DocumentLookup([1, 2, 3, 4]).find([2, 3], None) == (3, 2)
    assert DocumentLookup([1, 2, 3, 4]).take(3, 5) == [4]
    assert DocumentLookup([]).find([1, 2], None) is None
    assert DocumentLookup([7]).find([7, 7], None) is None


def test_one_token_is_too_little_and_another_order_is_no_match():
    lookup = DocumentLookup([5, 6, 7, 8, 9])
    assert lookup.find([6], None) is None
    assert lookup.find([9, 6], None) is None
    assert lookup.find([7, 6], None) is None


def test_codes_that_meet_are_told_apart():
    lookup = DocumentLookup([1 + 65_536, 2, 3, 1, 2, 4])
    assert lookup.find([1, 2], None) == (5, 2)
    assert lookup.find([1 + 65_536, 2], None) == (2, 2)
    assert lookup.find([1, 2 + 65_536], None) is None


def test_of_places_that_agree_as_much_the_usual_continuation_wins_and_one_soon_behind_the_last_before_it():
    tokens = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 9, 1, 2, 5]
    lookup = DocumentLookup(tokens)
    assert lookup.find([1, 2], None) == (10, 2)
    assert lookup.find([1, 2], 4) == (6, 2)
    assert lookup.find([1, 2], 12) == (14, 2)
    far = DocumentLookup([1, 2, 3, *range(100, 300), 1, 2, 4, 1, 2, 4])
    assert far.find([1, 2], 4) == (208, 2)


def test_a_million_tokens_take_16_bytes_each():
    lookup = DocumentLookup(np.arange(1_000_000) % 5000)
    assert lookup.nbytes == pytest.approx(16e6, rel=1e-3)
    assert lookup.find([17, 18, 19], None) is not None


def test_a_history_finds_the_last_place_by_its_longest_end():
    history = History([1, 2, 3, 7, 1, 2, 3, 8, 5, 2, 3])
    assert history.find(history.last(COMPARED), None) == (7, 2)
    history.push(8)
    assert history.find(history.last(COMPARED), None) == (8, 3)
    assert history.take(8, 3) == [5, 2, 3]
    history.push(99)
    assert history.find(history.last(COMPARED), None) is None


def test_a_history_agrees_with_a_search_through_it():
    random.seed(7)
    tokens, history = [], History()
    for _ in range(400):
        tokens.append(random.randrange(6))
        history.push(tokens[-1])
        context = tokens[-random.randrange(2, 20) :]
        found = history.find(context, None)
        best = max((agreeing(tokens, place, context) for place in range(1, len(tokens))), default=0)
        if found is None:
            assert best < SHORTEST
        else:
            assert agreeing(tokens, found[0], context) == found[1] >= min(best, LONGEST)
    assert len(history) == 400
