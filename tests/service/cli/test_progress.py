"""Progress of long commands where there is no terminal."""

import pytest

from service.cli.progress import LINE_EVERY_S, Lines, stages


def test_it_begins_at_once_and_tells_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    with stages("Importing a thing") as progress:
        assert capsys.readouterr().err == "Importing a thing ...\n"
        progress("reading", 0, 2)
        progress("reading", 2, 2)
        progress("measuring", 0, 4)
    assert capsys.readouterr().err.splitlines() == ["  reading: 0 %", "  reading: 100 %", "  measuring: 0 %"]


def test_a_stage_says_something_from_time_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = Lines(lambda: now)
    for done in range(101):
        lines("hashing", done, 100)
        now += LINE_EVERY_S / 10
    assert capsys.readouterr().err.splitlines() == [f"  hashing: {percent} %" for percent in range(0, 101, 10)]


def test_a_long_stage_says_how_long_it_still_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that was gone on with in its middle: by what was done since."""
    now = 0.0
    lines = Lines(lambda: now)
    for done in (400, 500, 990):
        lines("measuring", done, 1000)
        now += 600.0
    assert capsys.readouterr().err.splitlines() == [
        "  measuring: 40 %", "  measuring: 50 %, about 50 min left", "  measuring: 99 %",
    ]  # fmt: skip
