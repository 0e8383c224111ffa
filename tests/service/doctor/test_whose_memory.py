"""Settings are compared with the memory that the engine takes for them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.doctor import model_checks
from service.doctor.facts import MemoryFacts
from service.engine.ledger import CardMemory
from service.planning.nvidia import ENGINE, CardProcess
from tests.service.doctor.machine import CARD, GIB, Machine, look


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "machine_memory", lambda: CardMemory(free=8 * GIB, total=16 * GIB))


@pytest.mark.parametrize(
    ("planted", "offload", "gib", "status", "evidence"),
    [
        ({}, "auto", 12, "ok", "12.0 GiB of 21.5 GiB available on NVIDIA L4"),
        ({}, "all", 12, "ok", "on NVIDIA L4"),
        ({}, "all", 22, "fail", "21.5 GiB are available on NVIDIA L4"),
        ({"states": [CARD, replace(CARD, index=1)]}, "auto", 30, "ok", "on NVIDIA L4, NVIDIA L4"),
        ({}, "none", 12, "fail", "8.0 GiB are available"),
        ({}, "none", 7, "ok", "7.0 GiB of 8.0 GiB available"),
        ({"llama": []}, "auto", 12, "fail", "8.0 GiB are available"),
        ({"llama": None}, "auto", 12, "fail", "8.0 GiB are available"),
        ({"states": []}, "auto", 12, "fail", "8.0 GiB are available"),
        ({"variables": {"CUDA_VISIBLE_DEVICES": ""}}, "auto", 12, "fail", "8.0 GiB are available"),
        ({"states": [], "llama": ["metal"]}, "auto", 12, "fail", "8.0 GiB are available"),
        ({"states": [], "llama": ["vulkan"]}, "auto", 12, "skip", "vulkan"),
    ],
)
def test_what_llama_cpp_takes_on_a_card_is_not_asked_of_the_machine(
    planted: dict[str, Any], offload: str, gib: int, status: str, evidence: str, tmp_path: Path
) -> None:
    machine = Machine(**planted)
    found = look("host-memory", tmp_path, machine, engine="llamacpp", offload=offload, resident_bytes=gib * GIB)
    assert (found.status, evidence in found.evidence) == (status, True), found.evidence
    assert (found.status == "fail") == ("PREREAD_RESIDENT_BYTES" in found.remedy)


def test_what_a_running_llama_cpp_holds_of_the_card_counts_as_free(tmp_path: Path) -> None:
    own = CardProcess(7, f"python -m {ENGINE}", 20 * GIB)
    full = replace(CARD, free_nbytes=GIB)
    for processes, status in (((), "fail"), ((own,), "ok")):
        machine = Machine(states=[replace(full, processes=processes)])
        assert look("host-memory", tmp_path, machine, engine="llamacpp", resident_bytes=12 * GIB).status == status


def test_the_other_engines_take_the_machines_memory(tmp_path: Path) -> None:
    assert look("host-memory", tmp_path, Machine(), host_bytes=12 * GIB).status == "fail"
    assert look("host-memory", tmp_path, Machine(), engine="torch", resident_bytes=12 * GIB).status == "fail"
    assert look("host-memory", tmp_path, Machine(), host_bytes=GIB, resident_bytes=12 * GIB).status == "ok"


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"engine": "exl2"}, "lower PREREAD_HOST_BYTES or end"),
        ({"engine": "torch"}, "lower PREREAD_RESIDENT_BYTES or end"),
        ({"engine": "llamacpp", "offload": "none"}, "lower PREREAD_RESIDENT_BYTES or end"),
        ({"engine": "llamacpp"}, "end what else"),
    ],
)
def test_swap_names_the_setting_that_takes_the_machines_memory(
    changes: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    found = look("swap", tmp_path, Machine(held=MemoryFacts(GIB, GIB, GIB, {5: GIB})), **changes)
    assert found.status == "fail"
    assert found.remedy.startswith(remedy)
    assert look("swap", tmp_path, Machine(), **changes).status == "ok"
