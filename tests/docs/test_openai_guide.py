"""The page of the OpenAI-compatible calls says of every parameter what is done with it."""

import re
from pathlib import Path

import msgspec
import pytest

from service.api.openai import chat, response_wire

PAGE = (Path(__file__).parents[2] / "docs" / "openai.md").read_text(encoding="utf-8")


def row(beginning: str) -> list[set[str]]:
    """The parameters in both cells of a row of the table."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {beginning}")]
    return [{name.partition(".")[0] for name in re.findall(r"`([\w.]+)`", cell)} for cell in line.split("|")[2:4]]


@pytest.mark.parametrize(
    ("n", "wire", "body"), [(0, chat, chat.ChatRequest), (1, response_wire, response_wire.ResponseRequest)]
)
def test_every_parameter_is_in_its_row(n, wire, body):
    refused, ignored = row("refused")[n], row("ignored")[n]
    assert refused == set(wire.REFUSED)
    assert ignored == set(wire.IGNORED)
    every = {field.encode_name for field in msgspec.structs.fields(body)}
    assert row("taken")[n] == every - refused - ignored
