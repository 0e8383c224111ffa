"""What counts as a right answer about the example contract."""

import pytest

from benchmarks.contract_answers import is_right, report


@pytest.mark.parametrize(
    ("answer", "right"),
    [("It expires on 31\n January  2042.", True), ("31 JANUARY 2042", True), ("30 January 2042", False), ("", False)],
)
def test_a_value_counts_wherever_its_lines_break(answer, right):
    assert is_right(answer, ["31 January 2042", "2042-01-31"]) is right


def test_what_is_wrong_is_printed(capsys):
    questions = [{"id": f"q{n}", "question": "When?", "values": [value]} for n, value in enumerate(("a1", "b2"))]
    assert report(questions, ["an a1", "nothing"]) == 1
    printed = capsys.readouterr().out
    assert "q1 When? expected ['b2']: 'nothing'" in printed
    assert "q0" not in printed
