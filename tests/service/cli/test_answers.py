"""What of an answer reaches a terminal, and what reaches a file."""

import io
import sys

import pytest
from rich.console import Console

from service.cli import answers
from service.cli.answers import show_text


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stdout", "shown"),
    [(Terminal, "a\ufffd[2J\tb\nc\ufffd"), (io.StringIO, "a\x1b[2J\tb\nc\x9b")],
    ids=["terminal", "file"],
)
def test_a_document_gives_the_terminal_no_commands(monkeypatch, stdout, shown):
    monkeypatch.setattr(sys, "stdout", stdout())
    show_text("a\x1b[2J\tb\nc\x9b")
    assert sys.stdout.getvalue() == shown


@pytest.mark.parametrize(("stderr", "shown"), [(Terminal, "> a\ufffd[2J\n"), (io.StringIO, "> a\x1b[2J\n")])
def test_nor_does_a_question_of_somebody_else(monkeypatch, stderr, shown):
    monkeypatch.setattr(sys, "stderr", stderr())
    monkeypatch.setattr(answers, "err", Console(stderr=True, color_system=None, soft_wrap=True))
    answers.show_question("a\x1b[2J")
    assert sys.stderr.getvalue() == shown
