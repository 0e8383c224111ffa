"""Markdown as readable text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.formats.markdown import render
from ingest.formats.sections import paginate


def text_of(source: str) -> str:
    return "\n\n".join(section.text for section in render(source)[1])


KEPT = {
    "heading": ("Title\n=====\n\n## Part *two*", "# Title\n\n## Part two"),
    "emphasis": ("A **bold** and _soft_ `code`.", "A bold and soft code."),
    "link": (
        "[Act](https://x.org/a), <https://y.org>, [up](#top)",
        "Act (https://x.org/a), https://y.org, up",
    ),
    "reference": ("See [the act][a].\n\n[a]: https://x.org", "See the act (https://x.org)."),
    "image": ("![Floor plan](plan.png)", "[image: Floor plan]"),
    "nested list": ("* a\n* b\n    1. c\n    2. d", "- a\n- b\n  1. c\n  2. d"),
    "list from 7": ("7) seven\n8) eight", "7) seven\n8) eight"),
    "loose list": ("- a\n\n  more\n\n- b", "- a\n\n  more\n- b"),
    "quote": ("> said\n> she\n>\n> - so", "> said\n> she\n>\n> - so"),
    "table": (
        "|Item|Price|\n|:--|--:|\n|**A**|4,500|\n|B|12|",
        "| Item | Price |\n| --- | --- |\n| A | 4,500 |\n| B | 12 |",
    ),
    "code": ("```sh\n# not a heading\n  x | y\n```", "```sh\n# not a heading\n  x | y\n```"),
    "escapes": ("5 \\* 3 &lt; 20 &amp; more", "5 * 3 < 20 & more"),
    "comment": ("Seen\n\n<!-- hidden\n\norders -->\n\nSeen too <!-- x --> here", "Seen\n\nSeen too  here"),
    "tags": ("<p>One<br>two</p>\n\nH<sub>2</sub>O", "One\ntwo\n\nH2O"),
    "struck": ("~~old~~ new", "~~old~~ new"),
    "lines": ("first\nsecond\\\nthird", "first\nsecond\nthird"),
    "control strings": ("<|im_end|> stays", "<|im_end|> stays"),
}


@pytest.mark.parametrize("name", KEPT)
def test_structure_stays_and_marks_go(name: str):
    source, expected = KEPT[name]
    assert text_of(source) == expected


def test_the_title_is_the_front_matters_or_the_first_headings():
    assert render('---\ntitle: "Lease"\ndate: 2024\n---\n# Other\n')[0] == "Lease"
    assert render("Intro\n\n## First *one*\n")[0] == "First one"
    assert render("no heading")[0] is None
    assert "date: 2024" in text_of("---\ndate: 2024\n---\ntext")


def test_pages_begin_at_headings_and_are_named_after_them():
    section = "## Part {}\n\n" + "Words of the part. " * 100 + "\n\n"
    pages = paginate(render("".join(section.format(i) for i in range(6)))[1])
    assert [label for label, _ in pages] == [f"Part {i}" for i in range(6)]
    assert all(text.startswith(f"## {label}\n") for label, text in pages)


def test_a_long_section_goes_on_under_its_name():
    pages = paginate(render("# Long\n\n" + ("Some words. " * 50 + "\n\n") * 20)[1])
    assert len(pages) > 3
    assert {label for label, _ in pages} == {"Long"}


@pytest.mark.parametrize("source", ["> " * 300 + "deep", "*a **b " * 3000, "- " + "  - x\n" * 200])
def test_absurd_nesting_loses_no_word(source: str):
    assert set(re.findall(r"\w+", source)) <= set(re.findall(r"\w+", text_of(source)))


MARKUP = [
    "#",
    "|-",
    "|",
    "*",
    "**",
    "_",
    "[",
    "](",
    ")",
    ">",
    "~~",
    "1.",
    "- ",
    "word",
    "\n",
    "\n\n",
    "    ",
    "\\",
]


@given(st.lists(st.sampled_from(MARKUP), max_size=60))
def test_any_markup_renders_and_keeps_its_words(pieces: list[str]):
    source = " ".join(pieces)
    rendered = text_of(source)
    assert rendered.count("word") == source.count("word")
