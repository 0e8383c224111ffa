"""The stress of the disk tier, in short: `python -m benchmarks.store_stress` is the whole of it."""

from pathlib import Path

import pytest

from benchmarks.store_stress import Stress


@pytest.mark.slow
def test_processes_that_are_killed_leave_a_store_in_order(tmp_path: Path):
    report = Stress(tmp_path / "stress", processes=3, kill_every_s=1.0, budget_nbytes=1_500_000).run(400)
    assert report.cycles >= 400
    assert report.kills >= 1
    assert report.most_nbytes > report.budget_nbytes // 2
    assert report.over_nbytes < 8192  # the manifests of turns grow when they are published
    assert report.usage_error_nbytes == 0
    assert (report.damaged, report.left_over) == (0, [])
    assert report.outcomes["get whole"] > 20
