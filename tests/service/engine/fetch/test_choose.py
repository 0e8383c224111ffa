import torch
from hypothesis import given
from hypothesis import strategies as st

from cache_store.segments import Segments
from service.engine.fetch.choose import choose_spans
from service.engine.messages import SpanRef

LONG = Segments(256, 16)


def scores(n_spans, *best):
    """The first of `best` is the largest."""
    values = torch.zeros(n_spans)
    for place, span in enumerate(best):
        values[span] = 1 - place / 100
    return values


def test_the_best_spans_come_with_their_neighbours():
    found = choose_spans(scores(24, 11, 20), LONG, 768, resident=[], fetch_tokens=192)
    assert found == [SpanRef(10 * 32, 96), SpanRef(19 * 32, 96)]


def test_what_does_not_fit_whole_is_left_out():
    found = choose_spans(scores(24, 11, 20), LONG, 768, resident=[], fetch_tokens=100)
    assert found == [SpanRef(10 * 32, 96)]


def test_a_neighbour_of_another_segment_stays_out():
    found = choose_spans(scores(24, 7), LONG, 768, resident=[], fetch_tokens=64)
    assert found == [SpanRef(6 * 32, 64)]
    found = choose_spans(scores(24, 8), LONG, 768, resident=[], fetch_tokens=64)
    assert found == [SpanRef(8 * 32, 64)]


def test_touching_spans_become_one_but_not_across_segments():
    found = choose_spans(scores(24, 6, 9), LONG, 768, resident=[], fetch_tokens=192)
    assert found == [SpanRef(5 * 32, 96), SpanRef(8 * 32, 96)]


def test_one_segment_is_the_whole_document():
    found = choose_spans(scores(24, 7), Segments(), 768, resident=[], fetch_tokens=96)
    assert found == [SpanRef(6 * 32, 96)]


def test_resident_tokens_are_not_fetched_and_cost_nothing():
    found = choose_spans(scores(24, 0, 23), LONG, 750, resident=[(0, 16), (740, 750)], fetch_tokens=16 + 32 + 4 + 32)
    assert found == [SpanRef(16, 48), SpanRef(22 * 32, 36)]


def test_carried_spans_take_the_room_that_is_left():
    best = choose_spans(scores(24, 11), LONG, 768, resident=[], fetch_tokens=96)
    carried = [SpanRef(600, 40), SpanRef(320, 32)]
    assert choose_spans(scores(24, 11), LONG, 768, resident=[], fetch_tokens=96, carried=carried) == best


def test_nothing_to_fetch():
    assert choose_spans(torch.zeros(0), LONG, 0, resident=[], fetch_tokens=256) == []
    assert choose_spans(scores(8, 3), LONG, 256, resident=[(0, 256)], fetch_tokens=256) == []
    assert choose_spans(scores(8, 3), LONG, 256, resident=[], fetch_tokens=0) == []


@given(
    st.integers(1, 2000),
    st.sampled_from([Segments(), LONG, Segments(512, 0)]),
    st.integers(0, 600),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 300)), max_size=3),
    st.randoms(use_true_random=False),
)
def test_spans_are_apart_in_order_in_budget_and_not_resident(n_tokens, segments, budget, taken, random):
    resident = [(min(first, n_tokens), min(first + n, n_tokens)) for first, n in taken]
    values = torch.tensor([random.random() for _ in range(-(-n_tokens // 32))])
    carried = [SpanRef(first, last - first) for first, last in resident if first < last][:1]
    found = choose_spans(values, segments, n_tokens, resident=resident, fetch_tokens=budget, carried=carried)
    tokens = [token for ref in found for token in range(ref.first, ref.first + ref.n_tokens)]
    assert tokens == sorted(set(tokens))
    assert len(tokens) <= budget
    assert not tokens or tokens[-1] < n_tokens
    assert not any(first <= token < last for token in tokens for first, last in resident)
    ends = {last for _, last in segments.ranges(n_tokens)}
    assert not any(ref.first < end < ref.first + ref.n_tokens for ref in found for end in ends)
