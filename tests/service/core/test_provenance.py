"""Pages by how an answer could see them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.model import PageTokens
from service.core.provenance import Reading, notice_of
from service.core.retention import Policy
from service.engine.messages import SpanRef

POLICY = Policy("custom", False, 30, 100, 50, 256, 4, 256)
PAGES = [PageTokens(n, 20 + 100 * (n - 1), 20 + 100 * n) for n in range(1, 10)]
N_TOKENS = 925
"""20 before the pages, 5 behind them."""


def reading(*spans: tuple[int, int], pages=PAGES, policy=POLICY) -> Reading:
    return Reading.windowed("doc_1", policy, N_TOKENS, pages, [SpanRef(*span) for span in spans])


def modes(made: Reading) -> list[tuple[str, int, int]]:
    return [(part.mode, part.first_page, part.last_page) for part in made.provenance()]


def test_what_was_fetched_stands_apart_from_what_was_only_summarized():
    assert modes(reading((320, 32), (352, 64), (719, 32))) == [
        ("verbatim", 1, 1), ("verbatim", 9, 9),
        ("fetched", 4, 4), ("fetched", 7, 8),
        ("summary", 2, 3), ("summary", 5, 6),
    ]  # fmt: skip


def test_a_page_is_read_when_one_of_its_tokens_is():
    assert ("fetched", 4, 4) in modes(reading((419, 1)))
    assert ("fetched", 5, 5) in modes(reading((420, 1)))
    assert ("verbatim", 8, 9) in modes(reading(policy=replace_policy(window_tokens=106)))
    assert ("verbatim", 9, 9) in modes(reading(policy=replace_policy(window_tokens=105)))


def test_sinks_that_hold_only_the_instructions_read_no_page():
    assert modes(reading(policy=replace_policy(sink_tokens=20)))[0] == ("verbatim", 9, 9)


def test_without_a_summary_the_other_pages_were_not_read():
    assert modes(reading((320, 32), policy=replace_policy(summary_tokens=0))) == [
        ("verbatim", 1, 1), ("verbatim", 9, 9), ("fetched", 4, 4),
    ]  # fmt: skip


def test_blank_pages_part_no_ranges_and_are_in_none():
    pages = [*PAGES[:3], PageTokens(4, 320, 320), *(replace(page, number=page.number + 1) for page in PAGES[3:])]
    assert modes(reading(pages=pages)) == [("verbatim", 1, 1), ("verbatim", 10, 10), ("summary", 2, 9)]


@pytest.mark.parametrize(
    ("cited", "told"),
    [([4], False), ([1], False), ([9], False), ([3, 4], False), ([3], True), ([3, 5], True), ([], True)],
)
def test_a_notice_when_no_page_that_is_quoted_was_read(cited, told):
    notice = notice_of([reading((320, 32))], [("doc_1", page) for page in cited])
    assert (notice is not None) == told
    assert notice is None or "only summarized" in notice


def test_the_notice_where_there_is_no_summary():
    assert "not read" in str(notice_of([reading(policy=replace_policy(summary_tokens=0))], [("doc_1", 3)]))


@given(
    lengths=st.lists(st.integers(0, 120), min_size=1, max_size=40),
    spans=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 90)), max_size=5),
    sinks=st.integers(4, 300),
    window=st.integers(1, 300),
)
def test_every_page_with_text_is_in_some_mode_and_in_summary_only_when_nothing_of_it_was_read(
    lengths, spans, sinks, window
):
    pages, start = [], 20
    for number, length in enumerate(lengths, 1):
        pages.append(PageTokens(number, start, start + length))
        start += length
    n_tokens, policy = start + 5, replace_policy(sink_tokens=sinks, window_tokens=window)
    read = {*range(sinks), *range(n_tokens - window, n_tokens)} | {t for f, n in spans for t in range(f, f + n)}
    of_mode: dict[str, set[int]] = {"verbatim": set(), "fetched": set(), "summary": set()}
    for part in Reading.windowed("doc_1", policy, n_tokens, pages, [SpanRef(*span) for span in spans]).provenance():
        of_mode[part.mode] |= set(range(part.first_page, part.last_page + 1))
    for page in pages:
        tokens = set(range(page.token_start, page.token_end))
        if tokens:
            assert (page.number in of_mode["summary"]) == tokens.isdisjoint(read)
            assert (page.number in of_mode["verbatim"] | of_mode["fetched"]) == (not tokens.isdisjoint(read))


def replace_policy(**changes: int) -> Policy:
    return Policy(**POLICY.stored() | changes)
