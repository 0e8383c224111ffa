"""Threads of llama.cpp where nobody says how many."""

import os
from pathlib import Path

import psutil
import pytest

from service.engine.llama_engine.threads import default_threads


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), ("nonsense", 8), (None, 8)],
)
def test_every_core_that_a_container_may_use(tmp_path: Path, quota: str | None, expected: int):
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    assert default_threads(tmp_path / "cpu.max") == expected


def test_cores_that_are_not_for_this_process_and_second_threads_of_a_core_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert default_threads(tmp_path) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert default_threads(tmp_path) == 8
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: None)
    assert default_threads(tmp_path) == 16


@pytest.mark.parametrize(("value", "expected"), [("3", 3), ("0", 8), ("", 8), ("4,2", 8)])
def test_the_variable_of_torch_and_openmp_counts_here_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, expected: int
):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert default_threads(tmp_path) == expected
