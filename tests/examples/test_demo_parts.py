"""The demo's own parts: what it calls right, and what it prints."""

import io
import re
import signal
from dataclasses import replace

import pytest

from examples.demo_parts.report import Answer, Reading, Run, broken_promises, footnote, token_rows, wrong_answers
from examples.demo_parts.screen import Screen
from examples.demo_parts.server import signals_held_back

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
READING = Reading(
    n_pages=16, n_tokens=5206, kv_type="k8v4", snapshot_nbytes=49_000_000, prefilled_tokens=5206,
    prefill_s=20.0, total_s=21.0,
)  # fmt: skip
ANSWER = Answer(
    question="Who pays?", text="The Council pays.", first_text_s=0.2, reused_tokens=5206, prefilled_tokens=12,
    source="host", restore_ms=0.0, miss_reason=None, pages=(7,),
)  # fmt: skip
AFTER = replace(ANSWER, first_text_s=0.4, source="disk", restore_ms=300.0)
RUN = Run(READING, [ANSWER, ANSWER, ANSWER], AFTER, counter_before=5206, counter_after=0)


def test_an_answer_is_right_with_any_of_its_values():
    expected = {"Who pays?": ["the owner", "the council"]}
    assert wrong_answers([ANSWER], expected) == []
    (sentence,) = wrong_answers([replace(ANSWER, text="Nobody pays.")], expected)
    assert "Nobody pays." in sentence
    assert "'the owner' or 'the council'" in sentence


def test_nothing_is_broken_after_a_clean_restart():
    assert broken_promises(RUN) == []


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (replace(RUN, after=replace(AFTER, reused_tokens=5205, miss_reason="checksum")), "checksum"),
        (replace(RUN, counter_after=256), "256"),
        (replace(RUN, after=replace(AFTER, source="host")), "host"),
    ],
    ids=["reuse", "counter", "tier"],
)
def test_each_broken_promise_is_said(broken, said):
    (sentence,) = broken_promises(broken)
    assert said in sentence


def test_the_ratio_is_prefill_and_resident_answer_over_the_answer_from_the_snapshot():
    assert RUN.reprefill_s == pytest.approx(20.2)
    assert RUN.ratio == pytest.approx(50.5)
    assert "20.00 s" in footnote(RUN)


def test_the_table_counts_what_was_computed_before_and_after():
    rows = {label.strip(): (before, after) for label, before, after in token_rows(RUN)}
    assert rows["Prefilled tokens"] == ("5,242", "12")
    assert rows["of the document (engine's counter)"] == ("5,206", "0")


def show_everything(screen: Screen) -> None:
    screen.heading("1. Begin [now]")
    with screen.waiting() as wait:
        wait("the model")
    with screen.reading() as show:
        for stage, unit, total in (("queued", "pages", 0), ("parsing", "pages", 16), ("prefilling", "tokens", 5206)):
            for done in range(0, total + 1, 256):
                show({"stage": stage, "done": done, "total": total, "unit": unit, "eta_s": 3.2})
        show({"stage": "ready", "done": 5206, "total": 5206, "unit": "tokens", "eta_s": 0.0})
    screen.question("Who [b]pays[/b]?")
    for piece in ("The", " Council", " pays."):
        screen.piece(piece)
    screen.answered(AFTER)
    screen.table(RUN)
    screen.failure("Interrupted.")


@pytest.mark.parametrize("forcing", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}], ids=str)
def test_a_pipe_gets_plain_lines(monkeypatch, forcing):
    for name, value in forcing.items():
        monkeypatch.setenv(name, value)
    out = io.StringIO()
    show_everything(Screen(out))
    assert not CONTROL.search(out.getvalue())
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert "1. Begin [now]" in lines
    assert "  prefilling tokens: 0 of 5,206 tokens, 3 s left" in lines
    assert "Q Who [b]pays[/b]?" in lines
    assert "A The Council pays." in lines


def test_progress_in_a_pipe_is_at_most_a_line_for_each_tenth():
    out = io.StringIO()
    show_everything(Screen(out))
    assert 10 <= len(re.findall(r"^  prefilling tokens:", out.getvalue(), re.MULTILINE)) <= 11


def test_a_terminal_gets_bars_that_end_full(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    show_everything(Screen(out, terminal=True))
    assert "\x1b[" in out.getvalue()
    last = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out.getvalue())
    assert "5,206 of 5,206 tokens" in last
    assert "16 of 16 pages" in last


def test_a_console_without_utf8_gets_a_table_too():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    show_everything(Screen(out))
    out.flush()
    assert b"5,206" in raw.getvalue()


@pytest.fixture
def interruptible():
    """Python's own answer to SIGINT: a shell starts its background jobs with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_waits_for_the_end_of_a_start():
    reached = []

    def start() -> None:
        with signals_held_back():
            signal.raise_signal(signal.SIGINT)
            reached.append("end")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert reached == ["end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
