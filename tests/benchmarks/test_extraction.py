"""The extraction corpus: known words come out, in their order, on the pages where they belong."""

import asyncio
import io
import zipfile
from pathlib import Path

import pytest

from benchmarks.extraction import page
from benchmarks.extraction_parts.corpus import FORMATS, Outcome, read
from benchmarks.extraction_parts.scan_files import scan_of
from benchmarks.extraction_parts.score import score
from benchmarks.extraction_parts.story import ENGLISH, Made
from ingest.limits import ParseLimits
from ingest.ocr import find_recognizer
from ingest.sandbox import parse

LIMITS = ParseLimits()
HARD = {("PDF", "hyphens at line ends"): 0.99}
"""What is known not to come out whole."""
QUICK = [
    (kind, name)
    for kind, files in FORMATS.items()
    if kind != "PDF, scanned"
    for name in files
    if "chapters" not in name or kind == "EPUB"
]


@pytest.mark.parametrize(("kind", "name"), QUICK)
def test_the_words_of_a_document_come_out_in_order(kind: str, name: str, tmp_path: Path):
    outcome = read(FORMATS[kind][name](), tmp_path / "upload", LIMITS)
    assert outcome.score.accuracy >= HARD.get((kind, name), 0.995)
    assert outcome.made.n_pages in (None, len(outcome.pages))
    labels = tuple(label or str(number) for number, label in enumerate(outcome.labels, start=1))
    assert outcome.made.labels in ((), labels)


def test_long_documents_have_pages_of_a_page_s_length(tmp_path: Path):
    outcome = read(FORMATS["HTML"]["sixty chapters"](), tmp_path / "upload", LIMITS)
    assert outcome.score.accuracy == 1
    assert len(outcome.pages) > 10
    assert all(len(text) <= 3_200 for text in outcome.pages)


@pytest.mark.skipif(find_recognizer(ParseLimits(ocr_languages="eng"))[0] is None, reason="Tesseract is not installed")
def test_a_scanned_page_is_read_within_the_limits_of_the_parser_process(tmp_path: Path):
    made, path = scan_of(ENGLISH[0]), tmp_path / "upload"
    path.write_bytes(made.data)
    document = asyncio.run(parse(path, limits=ParseLimits(ocr_languages="eng")))
    assert score(made.truth, document.pages[0].text).accuracy > 0.97


def test_there_are_forty_documents_of_every_format():
    assert sum(map(len, FORMATS.values())) >= 40
    assert all(FORMATS.values())


def test_words_in_the_wrong_place_cost_twice():
    got = score("one two three four", "three four one two five")
    assert (got.n_truth, got.n_found, got.in_order) == (4, 5, 2)
    assert (got.recall, got.precision) == (0.5, 0.4)
    assert score("甲乙 ab", "甲乙ab").accuracy == 1


def test_the_page_has_a_line_for_every_document():
    outcomes = {
        "text": {"good": Outcome(Made(b"", "a b"), ["a b"], [None]), "bad": Outcome(Made(b"", "a b"), ["a"], [None])}
    }
    text = page(outcomes)
    assert "| text | 2 | 4 | 75.0 % | 100.0 % | 85.7 % | bad (66.7 %) |" in text
    assert "| good | 1 | 2 | 100.0 % | 100.0 % | 100.0 % |" in text
    assert "Tesseract was not installed" in text


def test_books_are_as_epub_wants_them():
    first = zipfile.ZipFile(io.BytesIO(FORMATS["EPUB"]["four chapters"]().data)).infolist()[0]
    assert (first.filename, first.compress_type) == ("mimetype", zipfile.ZIP_STORED)
