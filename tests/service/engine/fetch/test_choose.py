import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.segments import Segments
from service.engine.fetch.choose import REACH, Choices, best_passage, choose_among, choose_spans
from service.engine.fetch.index import Look
from service.engine.messages import SpanRef

LONG = Segments(256, 16)


def scores(n_spans, *best):
    """The first of `best` is the largest."""
    values = torch.zeros(n_spans)
    for place, span in enumerate(best):
        values[span] = 1 - place / 100
    return values


def chosen(values, budget, *, segments=LONG, n_tokens=768, resident=(), **more):
    found = choose_spans(Look.of(values), segments, n_tokens, resident=resident, fetch_tokens=budget, **more)
    return [(ref.first, ref.first + ref.n_tokens) for ref in found]


def test_the_best_spans_come_with_the_sentences_they_lie_in():
    starts = [0, 170, 180, 200, 310, 350]
    assert chosen(scores(48, 11, 20), 70, starts=starts) == [(170, 200), (310, 350)]


def test_a_sentence_that_is_too_long_is_cut():
    assert chosen(scores(48, 8), 112, starts=[0]) == [(128 - REACH, 144 + REACH)]
    assert chosen(scores(48, 1), 112, starts=[0]) == [(0, 32 + REACH)]


def test_without_sentences_neighbours_come_with_the_best_spans():
    assert chosen(scores(48, 10, 20), 160) == [(128, 208), (288, 368)]


def test_what_does_not_fit_whole_is_left_out_but_for_the_best_span():
    assert chosen(scores(48, 10, 20), 100) == [(128, 208)]
    assert chosen(scores(48, 10, 20), 16) == [(160, 176)]
    assert chosen(scores(48, 10, 20), 15) == []


def test_a_shorter_sentence_further_down_takes_the_room_that_is_left():
    starts = [0, 170, 200, 310, 350, 440, 470]
    assert chosen(scores(48, 11, 20, 28), 60, starts=starts) == [(170, 200), (440, 470)]


def test_neighbours_of_another_segment_stay_out():
    assert chosen(scores(48, 15), 48) == [(208, 256)]
    assert chosen(scores(48, 16), 48) == [(256, 304)]


def test_a_sentence_that_goes_on_in_the_next_segment_is_fetched_from_both():
    assert chosen(scores(48, 15), 60, starts=[0, 230, 290]) == [(230, 256), (256, 290)]
    assert chosen(scores(48, 17), 60, starts=[0, 230, 290]) == [(230, 256), (256, 290)]


def test_touching_spans_become_one_but_not_across_segments():
    assert chosen(scores(48, 6, 10), 144) == [(64, 208)]
    assert chosen(scores(48, 15, 16), 96) == [(208, 256), (256, 304)]


def test_one_segment_is_the_whole_document():
    assert chosen(scores(48, 15), 80, segments=Segments()) == [(208, 288)]


def test_resident_tokens_are_not_fetched_and_cost_nothing():
    found = chosen(scores(47, 0, 46), 32 + 36, n_tokens=750, resident=[(0, 16), (740, 750)])
    assert found == [(16, 48), (704, 740)]


def test_carried_spans_take_the_room_that_is_left():
    carried = [SpanRef(600, 40), SpanRef(320, 32)]
    nothing_more = torch.zeros(0)
    assert chosen(nothing_more, 60, carried=carried) == [(320, 352)]
    assert chosen(nothing_more, 100, carried=carried) == [(320, 352), (600, 640)]
    assert chosen(scores(48, 10), 80, carried=carried) == [(128, 208)]


def test_spans_that_nothing_looks_at_stay_out():
    assert chosen(scores(48, 10), 500) == [(128, 208)]


def test_spans_far_below_the_best_stay_out_whatever_the_budget():
    values = scores(48, 10, 20, 30)
    values[20], values[30] = 0.51, 0.49
    assert chosen(values, 500) == [(128, 208), (288, 368)]
    assert chosen(values, 500, least_share=0.6) == [(128, 208)]
    assert chosen(values, 500, least_share=0.0) == [(128, 208), (288, 368), (448, 512)]


def test_the_best_of_several_documents_is_what_others_are_measured_by():
    both = [torch.tensor([0.0, 0.4, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.9, 0.0])]
    documents = [Choices(Look.of(figures), Segments(), 64, (), (0, 16, 32, 48)) for figures in both]
    assert choose_among(documents, fetch_tokens=64) == [SpanRef(32, 16, 1)]
    assert choose_among(documents, fetch_tokens=64, least_share=0.4) == [SpanRef(16, 16, 0), SpanRef(32, 16, 1)]


def test_a_span_that_other_words_look_at_comes_however_small_and_one_that_only_looks_alike_does_not():
    """Two words of the question: one looks at span 10 and less at 20, the other at 30 alone."""
    places = torch.tensor([10, 20, 30])
    rows = torch.tensor([[0.8, 0.4, 0.0], [0.2, 0.0, 0.3]])
    look = Look(torch.zeros(48).index_put((places,), rows.sum(0)), places, rows)
    found = choose_spans(look, LONG, 768, resident=(), fetch_tokens=500, neighbours=0, least_gain=0.1)
    assert [span.first // 16 for span in found] == [10, 30]
    found = choose_spans(look, LONG, 768, resident=(), fetch_tokens=500, neighbours=0, least_gain=0.11)
    assert [span.first // 16 for span in found] == [10]


def test_nothing_to_fetch():
    assert choose_spans(Look.of(torch.zeros(0)), LONG, 0, resident=[], fetch_tokens=256) == []
    assert choose_spans(Look.of(scores(16, 3)), LONG, 256, resident=[(0, 256)], fetch_tokens=256) == []
    assert choose_spans(Look.of(scores(16, 3)), LONG, 256, resident=[], fetch_tokens=0) == []


@settings(deadline=None)
@given(
    st.integers(1, 2000),
    st.sampled_from([Segments(), LONG, Segments(512, 0)]),
    st.integers(0, 600),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 300)), max_size=3),
    st.sets(st.integers(0, 2000), max_size=40),
    st.randoms(use_true_random=False),
)
def test_spans_are_apart_in_order_in_budget_and_not_resident(n_tokens, segments, budget, taken, begun, random):
    resident = [(min(first, n_tokens), min(first + n, n_tokens)) for first, n in taken]
    values = torch.tensor([random.random() for _ in range(-(-n_tokens // 16))])
    starts = sorted(start for start in begun if start < n_tokens)
    carried = [SpanRef(first, last - first) for first, last in resident if first < last][:1]
    found = choose_spans(
        Look.of(values), segments, n_tokens, resident=resident, fetch_tokens=budget, carried=carried, starts=starts
    )
    tokens = [token for ref in found for token in range(ref.first, ref.first + ref.n_tokens)]
    assert tokens == sorted(set(tokens))
    assert len(tokens) <= budget
    assert not tokens or tokens[-1] < n_tokens
    assert not any(first <= token < last for token in tokens for first, last in resident)
    ends = {last for _, last in segments.ranges(n_tokens)}
    assert not any(ref.first < end < ref.first + ref.n_tokens for ref in found for end in ends)


def test_the_best_passage_is_the_best_span_of_all_documents_with_its_sentences():
    both = [torch.tensor([0.1, 0.2, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.9, 0.1])]
    one, two = (Choices(Look.of(figures), Segments(), 64, (), (0, 20, 36, 40)) for figures in both)
    assert best_passage([one, two]) == (1, 20, 64)
    assert best_passage([one]) == (0, 0, 36)
