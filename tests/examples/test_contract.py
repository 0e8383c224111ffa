"""The example contract is what its source renders to, and its questions have one right place each."""

import importlib.util
import json
import re
import sys
from io import BytesIO
from pathlib import Path

import pytest
from pypdf import PdfReader

FOLDER = Path(__file__).parents[2] / "examples" / "contract"
REFUSAL = "The document does not say"


def squeeze(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def texts(pdf: bytes) -> list[str]:
    return [page.extract_text() for page in PdfReader(BytesIO(pdf)).pages]


@pytest.fixture(scope="module")
def render():
    spec = importlib.util.spec_from_file_location("make_pdf", FOLDER / "make_pdf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_pdf"] = module
    spec.loader.exec_module(module)
    return module.render


@pytest.fixture(scope="module")
def source() -> str:
    return (FOLDER / "contract.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pages() -> list[str]:
    return texts((FOLDER / "contract.pdf").read_bytes())


@pytest.fixture(scope="module")
def questions() -> list[dict]:
    return json.loads((FOLDER / "questions.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def answerable(questions: list[dict]) -> list[dict]:
    return [question for question in questions if not question["unanswerable"]]


def clauses(source: str) -> list[str]:
    """Every clause and every table row of the source."""
    return [squeeze(line) for line in source.splitlines() if re.match(r"[\dA-C]+\.\d+ |\| ", line)]


def test_the_pdf_is_what_the_source_renders_to(render, source, pages):
    assert texts(render(source)) == pages


def test_rendering_twice_gives_the_same_bytes(render, source):
    assert render(source) == render(source)


def test_at_least_twelve_numbered_pages(pages):
    assert len(pages) >= 12
    for number, text in enumerate(pages, 1):
        assert text.rstrip().endswith(f"Page {number}")


def test_every_clause_comes_out_of_the_pdf_in_order(source, pages):
    text = squeeze(re.sub(r"\nPage \d+\s*$", "", "\n".join(pages), flags=re.MULTILINE))
    position = 0
    for clause in clauses(source):
        position = text.find(squeeze(clause.replace("|", " ")), position)
        assert position >= 0, clause


def test_table_rows_are_single_lines(pages):
    lines = [line.strip() for page in pages for line in page.splitlines()]
    assert "Boiler Chestnut burns natural gas rated output 5,700 kilowatts installed in 2009" in lines


def test_no_word_is_split_by_a_line_end(pages, source):
    words = set(squeeze(source).split())
    for line in (line.strip() for page in pages for line in page.splitlines()):
        assert line.startswith("Page ") or set(line.split()) <= words, line


def test_forty_questions_six_of_them_unanswerable(questions):
    assert len(questions) == 40
    assert sum(question["unanswerable"] for question in questions) == 6
    assert len({question["id"] for question in questions}) == 40
    assert len({question["question"] for question in questions}) == 40


def test_each_value_is_on_the_page_named_and_on_no_other(answerable, pages):
    for question in answerable:
        found = [n for n, text in enumerate(pages, 1) if mentions(text, question["values"])]
        assert found == [question["page"]], question


def test_each_value_is_in_one_clause_only(answerable, source):
    for question in answerable:
        found = [clause for clause in clauses(source) if mentions(clause, question["values"])]
        assert len(found) == 1, (question, found)


def test_no_value_is_split_by_a_line_end(answerable, pages):
    for question in answerable:
        lines = pages[question["page"] - 1].splitlines()
        assert any(mentions(line, question["values"]) for line in lines), question


def test_unanswerable_questions_expect_a_refusal_that_the_document_does_not_contain(questions, pages):
    for question in (question for question in questions if question["unanswerable"]):
        assert question["values"] == [REFUSAL]
        assert question["page"] is None
    assert not mentions(" ".join(pages), [REFUSAL])


@pytest.mark.parametrize(
    "topic", ["trade union", "salary", "lease", "value added", "leisure centre was built", "drinking water"]
)
def test_topics_of_the_unanswerable_questions_are_absent(pages, topic):
    assert topic not in squeeze(" ".join(pages)).lower()


def mentions(text: str, values: list[str]) -> bool:
    folded = squeeze(text).lower()
    return any(value.lower() in folded for value in values)
