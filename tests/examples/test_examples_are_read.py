"""The example documents pass through our own reader without a warning, as what they are."""

from pathlib import Path

import pytest

from ingest.extract import extract
from ingest.limits import ParseLimits
from ingest.model import MediaType
from ingest.wire import Finished, Opened, PageRead

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "media_type", "text"),
    [
        (
            "contract/contract.pdf",
            MediaType.PDF,
            "The safety officer of the Operator is Bartholomew Kemp.",
        ),
        ("notes.md", MediaType.MARKDOWN, "Every jar is opened once in four years"),
        ("letter.txt", MediaType.TEXT, "The repair costs 2,890 pounds"),
    ],
)
def test_examples_are_read_as_what_they_are_without_a_warning(name, media_type, text):
    messages = list(extract(EXAMPLES / name, ParseLimits()))
    opened, finished = messages[0], messages[-1]
    pages = [message for message in messages if isinstance(message, PageRead)]
    assert isinstance(opened, Opened)
    assert opened.media_type is media_type
    assert isinstance(finished, Finished)
    assert not finished.warnings
    flowing = " ".join(" ".join(page.text for page in pages).split())
    assert text in flowing
    assert all(page.text.strip() for page in pages)


def test_every_page_of_the_contract_is_read_and_none_is_empty():
    messages = list(extract(EXAMPLES / "contract" / "contract.pdf", ParseLimits()))
    pages = [message for message in messages if isinstance(message, PageRead)]
    assert [page.number for page in pages] == list(range(1, 17))
    assert all(page.text.rstrip().endswith(f"Page {page.number}") for page in pages)
