"""What an upload may ask of retention."""

import pytest

from service.core.wishes import Kept, Wish, parse_wish, stored_wish
from service.errors import Invalid

NUMBERS = '{"sink_tokens": 4, "summary_tokens": 0, "window_tokens": 1}'


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("", Wish()),
        (" automatic ", Wish()),
        ("full", Wish("full")),
        ("balanced", Wish("balanced", Kept(16, 1024, 512))),
        ("small", Wish("small", Kept(16, 0, 256))),
        (NUMBERS, Wish("custom", Kept(4, 0, 1))),
    ],
)
def test_a_wish_survives_being_stored(text, wish):
    assert parse_wish(text) == wish
    assert stored_wish(wish.stored()) == wish


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("window", "`balanced`"),
        ("FULL", "`full`"),
        ("[]", "JSON"),
        ("null", "JSON"),
        ("custom", "JSON"),
        ("{", "truncated"),
        ("{}", "sink_tokens"),
        ('{"sink_tokens": 4}', "missing required field `summary_tokens`"),
        (NUMBERS.replace("4", "3"), ">= 4 - at `$.sink_tokens`"),
        (NUMBERS.replace("0", "-1"), ">= 0 - at `$.summary_tokens`"),
        (NUMBERS.replace(": 1}", ": 0}"), ">= 1 - at `$.window_tokens`"),
        (NUMBERS.replace("4", "4.0"), "got `float`"),
        (NUMBERS.replace("4", "true"), "got `bool`"),
        (NUMBERS.replace("4", '"4"'), "got `str`"),
        (NUMBERS.replace("}", ', "slots": 3}'), "unknown field `slots`"),
    ],
)
def test_what_is_no_wish_is_refused_with_what_could_be_written(text, words):
    with pytest.raises(Invalid) as refused:
        parse_wish(text)
    assert refused.value.param == "retention"
    assert words in refused.value.detail
    assert '{"sink_tokens": 16, "summary_tokens": 1024, "window_tokens": 512}' in refused.value.detail


def test_wishes_that_give_other_snapshots_have_other_keys():
    wishes = ["", "full", "balanced", "small", NUMBERS, NUMBERS.replace("4", "40")]
    assert len({parse_wish(text).key for text in wishes}) == len(wishes)
    assert parse_wish("").key == "full"


def test_what_documents_asked_for_before_there_was_a_choice():
    assert stored_wish({"preset": "full"}) == Wish("full")
    assert stored_wish({}) == Wish()
