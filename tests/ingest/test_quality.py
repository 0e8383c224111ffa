import pytest

from ingest.errors import EmptyDocument, NoTextLayer, PoorText
from ingest.quality import PageQuality, judge, measure

GOOD = "The supplier pays EUR 4,500. " * 10


@pytest.mark.parametrize(
    "garbage",
    [
        "\ufffd" * 40,
        "(cid:12)(cid:7)" * 20,
        "/G01/G02/g17" * 15,
        "\ue001\uf8ff" * 20,
        "\x03\x04\x11" * 15,
    ],
)
def test_characters_without_a_meaning_make_a_page_poor(garbage: str):
    assert measure(1, GOOD + garbage).is_poor
    assert not measure(1, GOOD).is_poor


@pytest.mark.parametrize(
    "text", ["see /etc/G01x and /usr", "café 漢字 \N{GRINNING FACE}\u200d", "a\tb\r\n\fc", "m² 10 % §§ 3"]
)
def test_unusual_text_is_not_poor(text: str):
    assert measure(1, text).n_meaningless == 0


def pages(*kinds: str) -> list[PageQuality]:
    raw = {"good": GOOD, "scan": "", "blank": "", "poor": GOOD + "\ufffd" * 100}
    return [measure(i, raw[kind], shows_something=kind != "blank") for i, kind in enumerate(kinds, start=1)]


def test_a_good_document_has_no_warnings():
    assert judge(pages("good", "blank", "good")) == ()


def test_the_numbers_are_in_the_refusal():
    with pytest.raises(NoTextLayer) as scanned:
        judge(pages("scan", "scan", "good", "blank"))
    assert (scanned.value.n_without, scanned.value.n_pages) == (2, 4)
    with pytest.raises(PoorText) as poor:
        judge(pages("poor", "good"))
    assert (poor.value.n_poor, poor.value.n_pages) == (1, 2)
    assert 25 < poor.value.share_percent < 35


def test_few_bad_pages_are_named_in_warnings():
    scan, poor = judge(pages("good", "scan", "good", "good", "good", "poor"))
    assert scan == "1 of 6 pages has no text layer and cannot be asked about: page 2."
    assert poor.startswith("1 of 6 pages has characters that cannot be read (29 % of their text): page 6.")


def test_many_pages_are_not_all_listed():
    (warning,) = judge(pages(*["scan"] * 14, *["good"] * 20))
    assert warning.endswith("pages 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 4 more.")


def test_nothing_at_all():
    with pytest.raises(EmptyDocument, match="no pages"):
        judge([])
    with pytest.raises(EmptyDocument, match="no text"):
        judge(pages("blank", "blank"))
