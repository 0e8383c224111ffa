"""What of an answer reaches a terminal, and what reaches a file."""

import io
import sys

import pytest

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
