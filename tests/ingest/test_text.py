"""Plain text into pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.formats.text import PAGE_CHARS, split_pages, title_of

PARAGRAPH = "The supplier delivers on Monday. " * 12 + "\n\n"


def test_pages_end_where_paragraphs_end():
    pages = split_pages(PARAGRAPH * 40)
    assert len(pages) > 4
    assert all(PAGE_CHARS // 2 <= len(page) <= PAGE_CHARS for page in pages[:-1])
    assert all(page.endswith("\n\n") for page in pages)


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("line of a log\n" * 1000, "\n"),
        ("One sentence. " * 1000, ". "),
        ("word " * 2000, " "),
        ("漢字。" * 3000, "。"),
    ],
)
def test_without_paragraphs_the_next_best_boundary_is_used(text: str, ends: str):
    pages = split_pages(text)
    assert len(pages) > 2
    assert all(page.endswith(ends) for page in pages[:-1])


def test_a_form_feed_ends_a_page():
    assert split_pages("one\ftwo\f\f three") == ["one", "two", " three"]


def test_one_endless_word_is_cut_all_the_same():
    assert [len(page) for page in split_pages("x" * 7_000)] == [3_000, 3_000, 1_000]


@given(st.text(st.sampled_from("ab.漢 \n"), max_size=20), st.integers(1, 2_000))
def test_nothing_but_white_space_is_lost(piece: str, times: int):
    text = piece * times
    pages = split_pages(text)
    assert "".join("".join(pages).split()) == "".join(text.split())
    assert all(len(page) <= PAGE_CHARS for page in pages)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Lease agreement\n\nBetween A and B", "Lease agreement"),
        ("A line\nand another\n", None),
        ("", None),
        ("Only line", "Only line"),
        ("x" * 200 + "\n\nrest", None),
    ],
)
def test_a_first_line_that_stands_alone_is_the_title(text: str, title: str | None):
    assert title_of(text) == title
