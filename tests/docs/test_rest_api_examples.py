"""The JSON examples of the REST guide are bodies that the API can send."""

import re
from pathlib import Path

import msgspec
import pytest

from service.api.problems import Problem
from service.api.schemas.documents import DocumentBody, PageBody, Receipt
from service.api.schemas.questions import AnswerBody, QuestionBody

GUIDE = (Path(__file__).parents[2] / "docs" / "rest-api.md").read_text(encoding="utf-8")


def example(heading: str) -> bytes:
    section = GUIDE.split(f"\n{heading}\n", 1)[1]
    match = re.search(r"```json\n(.*?)```", section, re.DOTALL)
    assert match is not None
    return match[1].encode()


@pytest.mark.parametrize(
    ("heading", "body"),
    [
        ("### `GET /v1/documents/{id}`", DocumentBody),
        ("### `GET /v1/documents/{id}/pages/{n}`", PageBody),
        ("### `DELETE /v1/documents/{id}`", Receipt),
        ("### `POST /v1/sessions/{id}/questions`", AnswerBody),
        ("## Errors", Problem),
    ],
)
def test_examples_have_the_fields_of_the_body_and_no_other(heading, body):
    shown = msgspec.json.decode(example(heading))
    assert set(shown) <= {field.encode_name for field in msgspec.structs.fields(body)}
    msgspec.json.decode(example(heading), type=body)


def test_every_parameter_of_a_question_is_explained():
    section = GUIDE.split("\n### `POST /v1/sessions/{id}/questions`\n", 1)[1].split("\n### ", 1)[0]
    table = section.split("\n\nA session answers", 1)[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert set(named) == {field.encode_name for field in msgspec.structs.fields(QuestionBody)}
