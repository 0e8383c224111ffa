import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.normalise import LineJoiner, narrow_gaps, tidy

TIDIED = {
    "ligatures": ("ﬁnal oﬃce ﬂow", "final office flow"),
    "decomposed": ("Cafe\u0301 Ko\u0308ln", "Café Köln"),
    "soft hyphen": ("agree\u00adment and con\u00ad\n  tract", "agreement and contract"),
    "spaces": ("1\u00a0200\u202f€\u3000x\ty", "1 200 € x y"),
    "invisible": ("a\u200bb\ufeffc\u202ed\u2066e", "abcde"),
    "joiners stay": ("\N{MAN}\u200d\N{WOMAN}", "\N{MAN}\u200d\N{WOMAN}"),
    "controls": ("a\x01b\x1f\x7f\x9bc", "abc"),
    "line ends": ("a\r\nb\rc\u2028d\x85e\u2029f", "a\nb\nc\nd\ne\n\nf"),
    "blank lines": ("\n\na  \n \n\n\n b\n", "a\n\n b"),
    "columns stay": ("Item      Price\nA            12", "Item      Price\nA            12"),
    "lone surrogate": ("a\ud800b", "a\ufffdb"),
    "surrogate pair": ("\ud83d\ude00", "\N{GRINNING FACE}"),
    "superscripts stay": ("m² ½ ①", "m² ½ ①"),
}


@pytest.mark.parametrize("name", TIDIED)
def test_tidy(name: str):
    raw, expected = TIDIED[name]
    assert tidy(raw) == expected


@given(st.text(max_size=200))
def test_tidy_is_idempotent_composed_and_encodable(text: str):
    once = tidy(text)
    assert tidy(once) == once
    assert unicodedata.is_normalized("NFC", once)
    once.encode()


def test_gaps_and_leaders_narrow_but_stay():
    assert narrow_gaps("  Item      Price\nA  12") == "  Item  Price\nA  12"
    assert narrow_gaps("1. Scope . . . . . . . 3\nName ________ ok...") == "1. Scope ... 3\nName ___ ok..."


JOINED = {
    "plain": ("the agree-\nment shall", "the agreement\nshall"),
    "known compound": ("long-term and long-\nterm", "long-term and long-term\n"),
    "known word": ("Data-\nbase, database", "Database,\ndatabase"),
    "keeps its hyphen": ("a self-\nemployed person", "a self-employed\nperson"),
    "capital after": ("Meyer-\nSchmidt", "Meyer-Schmidt\n"),
    "acronym": ("an EU-\nwide rule", "an EU-wide\nrule"),
    "digits": ("2019-\n2020 and A-\n12", "2019-\n2020 and A-\n12"),
    "dash": ("it was -\nthen", "it was -\nthen"),
    "German": ("die Verein-\nbarung gilt", "die Vereinbarung\ngilt"),
}


@pytest.mark.parametrize("name", JOINED)
def test_words_split_by_a_line_end_are_joined_with_care(name: str):
    raw, expected = JOINED[name]
    assert LineJoiner().join(raw) == expected


def test_earlier_pages_decide():
    joiner = LineJoiner()
    joiner.join("a co-pilot")
    assert joiner.join("the co-\npilot") == "the co-pilot\n"
