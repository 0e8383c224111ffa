"""Numbers that mean nothing are refused by the commands that count with them."""

import pytest
from click.testing import CliRunner

from service.cli.bench import bench
from service.cli.plan import plan

MODEL = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--params", "8", "--card", "v100-16")


@pytest.mark.parametrize(
    "words",
    [
        ("--bits", "-4"), ("--bits", "nan"), ("--params", "inf"), ("--params", "-5"), ("--bandwidth", "nan"),
        ("--disk", "-1"), ("--window", "-5"), ("--heads", "-8"), ("--layers", "100000000"), ("--memory-gb", "inf"),
        ("--bandwidth", "1e-300"), ("--bits", "1e-300"), ("--users", "9" * 20), ("--documents", "0"),
        ("--bandwidth", "0"), ("--layers", "0"), ("--context", "9" * 20),
        ("--vocab", "2000000000"), ("--hidden", "2000000000"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_plan_of_numbers_that_mean_nothing_is_refused(words):
    done = CliRunner().invoke(plan, [*MODEL, *words])
    assert done.exit_code == 2
    assert words[0] in done.output


@pytest.mark.parametrize(
    "words",
    [
        ("--contexts", "9" * 20), ("--contexts", "9" * 5000), ("--contexts", "²"), ("--minutes", "nan"),
        ("--worse", "nan"), ("--bandwidth", "-1"),
    ],
    ids=lambda words: f"{words[0]} {words[1][:20]}",
)  # fmt: skip
def test_a_bench_of_numbers_that_mean_nothing_is_refused(words):
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 2
    assert words[0] in done.output
