"""HTML as readable text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.formats.html import decoded, read_html
from ingest.formats.sections import paginate
from ingest.limits import ParseLimits

LIMITS = ParseLimits()


def text_of(source: str) -> str:
    return "\n=====\n".join(text for _, text in paginate(read_html(source, LIMITS).sections))


KEPT = {
    "paragraphs": ("<p>One\n two<p>three", "One two\n\nthree"),
    "headings": ("<h1>A <b>b</b></h1>x<h3>C</h3>", "# A b\n\nx\n\n### C"),
    "words in parts": ("<p>har<b>bour</b> <i>fee</i>s</p>", "harbour fees"),
    "line breaks": ("<p>one<br>two<br/> three</p>", "one\ntwo\nthree"),
    "bullets": ("<ul><li>a<li>b</ul>c", "- a\n- b\n\nc"),
    "numbers": ("<ol start=3><li>a<li value=9>b<li>c</ol>", "3. a\n9. b\n10. c"),
    "lists in lists": ("<ul><li>a<ol><li>b<li>c</ol><li>d</ul>", "- a\n  1. b\n  2. c\n- d"),
    "items of several paragraphs": ("<ol><li><p>a</p><p>b</p><li>c</ol>", "1. a\n  b\n2. c"),
    "quotes": ("<blockquote><p>a</p><p>b</p></blockquote>c", "> a\n\n> b\n\nc"),
    "code": ("<pre>if x:\n    y()\n</pre>", "```\nif x:\n    y()\n```"),
    "table": ("<table><tr><th>a<th>b<tr><td>1<td>2</table>", "| a | b |\n| --- | --- |\n| 1 | 2 |"),
    "cells over rows": (
        "<table><tr><td rowspan=2>a<td>1<tr><td>2</table>",
        "| a | 1 |\n| --- | --- |\n| a | 2 |",
    ),
    "cells over columns": (
        "<table><tr><td colspan=2>a<td>b<tr><td>1<td>2<td>3</table>",
        "| a |  | b |\n| --- | --- | --- |\n| 1 | 2 | 3 |",
    ),
    "a table of one column": ("<table><tr><td>a<tr><td>b</table>", "a\nb"),
    "definitions": ("<dl><dt>a<dd>b</dl>", "a\n\nb"),
    "picture": ("<p>a <img alt='a plan' src='http://x.org/p.png'><img src='q.png'></p>", "a [image: a plan]"),
    "hidden": ("<p>a</p><p hidden>b</p><p style='DISPLAY : none'>c</p><script>d</script>", "a"),
    "form": ("<p><input type=checkbox checked> yes <input value='Ada'><input type=password value=x></p>", "☒ yes Ada"),
    "control strings": ("<p>&lt;|im_end|&gt; stays</p>", "<|im_end|> stays"),
    "rule": ("a<hr>b", "a\n\n---\n\nb"),
}


@pytest.mark.parametrize("name", KEPT)
def test_structure_stays_readable(name: str):
    source, expected = KEPT[name]
    assert text_of(source) == expected


def test_the_title_is_the_page_s_own_else_its_first_heading():
    assert read_html("<title> A\n b </title><h1>c</h1>", LIMITS).title == "A b"
    assert read_html("<p>a</p><h2>c</h2>", LIMITS).title == "c"
    assert read_html("<p>a</p>", LIMITS).title is None


def test_pages_begin_at_headings_and_are_called_by_them():
    source = "".join(f"<h2>Part {n}</h2><p>{'word ' * 400}</p>" for n in range(4))
    pages = paginate(read_html(source, LIMITS).sections)
    assert [label for label, _ in pages] == ["Part 0", "Part 1", "Part 2", "Part 3"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("<meta charset=windows-1251><p>Привет".encode("cp1251"), "Привет"),
        ("<?xml version='1.0' encoding='iso-8859-2'?><p>łąka".encode("iso-8859-2"), "łąka"),
        ("<meta charset=iso-8859-1><p>Grüße".encode(), "Grüße"),
        ("<p>Grüße".encode("utf-16"), "Grüße"),
        ("<meta charset=nonsense><p>Gr\xfc\xdfe und K\xfcsse".encode("latin-1"), "Grüße und Küsse"),
        ("<meta charset=undefined><p>Gr\xfc\xdfe und K\xfcsse".encode("latin-1"), "Grüße und Küsse"),
        ("<meta charset=utf-8><p>Gr\xfc\xdfe und K\xfcsse".encode("latin-1"), "Grüße und Küsse"),
        ("<meta charset=iso-8859-1><p>“€ 500” – that’s it…".encode("cp1252"), "“€ 500” – that’s it…"),
    ],
)
def test_the_encoding_is_that_of_the_bytes_or_the_one_it_names(data: bytes, expected: str):
    assert text_of(decoded(data)[0]) == expected


def test_what_an_encoding_does_not_have_is_said():
    text, warning = decoded(b"<meta charset=windows-1252><p>Gr\xfc\xdfe \x81 und K\xfcsse")
    assert "Grüße \ufffd und Küsse" in text
    assert warning == "1 characters are not valid CP1252 and were replaced by U+FFFD."


def test_marked_text_of_xhtml_is_text():
    source = "<html><body><script>//<![CDATA[\nx<y\n//]]></script><p>a <![CDATA[<b> & c]]> d</p></body></html>"
    assert [section.text for section in read_html(source, LIMITS, is_xhtml=True).sections] == ["a <b> & c d"]


def test_elements_of_xhtml_close_themselves():
    page = read_html(
        "<html><title/><body><p/><a id='x>'/><p>a</p><script src='x'/><p>b</p></body></html>", LIMITS, is_xhtml=True
    )
    assert [section.text for section in page.sections] == ["a", "b"]


PIECES = st.sampled_from(
    [
        "<table>", "</table>", "<tr>", "<td rowspan=3>", "<td colspan=9>", "</td>", "<li>", "<ul>", "</ul>", "<ol>",
        "<pre>", "</pre>", "<h1>", "</h1>", "<p>", "text", " more ", "<b>", "</i>", "<br>", "&amp;", "<!--", "-->",
        "<svg>", "</svg>", "<title>", "\0",
    ]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=30))
def test_any_order_of_elements_gives_text(pieces: list[str]):
    for is_xhtml in (False, True):
        page = read_html("".join(pieces), LIMITS, is_xhtml=is_xhtml)
        assert all(section.text for section in page.sections)
        assert not any("<td" in section.text for section in page.sections)
