"""Faults of cards and of what was compiled for them, planted in a healthy machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from service.planning.nvidia import CardProcess
from tests.service.doctor.machine import CARD, GIB, TORCH, Machine, look, write_model

CHECKS = ("off-card", "other-processes", "throttling", "pcie", "first-call", "versions", "kernels", "dtype")


@pytest.mark.parametrize("check", CHECKS)
def test_a_healthy_card_is_not_complained_about(check: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    found = look(check, tmp_path, Machine(), model)
    assert (found.status, found.remedy) == ("ok", "")


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_card_nothing_is_said_of_cards(check: str, tmp_path: Path) -> None:
    machine = Machine(states=[], clocks=set(), installed=msgspec.structs.replace(TORCH, cuda="", archs=[]))
    assert look(check, tmp_path, machine, engine="torch").status in ("ok", "skip")


def torch(**changes: Any) -> dict[str, Any]:
    return {"installed": msgspec.structs.replace(TORCH, **changes)}


def card(**changes: Any) -> dict[str, Any]:
    return {"states": [replace(CARD, **changes)]}


V100 = {"name": "Tesla V100-SXM2-16GB", "total_nbytes": 16 * GIB, "capability": (7, 0)}


@pytest.mark.parametrize(
    ("check", "planted", "status", "evidence", "remedy"),
    [
        ("off-card", {"states": []}, "fail", "no NVIDIA driver answers", "nvidia-smi"),
        ("off-card", {"variables": {"CUDA_VISIBLE_DEVICES": ""}}, "fail", "hides all 1 cards", "unset it"),
        ("off-card", {"variables": {"CUDA_VISIBLE_DEVICES": "-1"}}, "fail", "hides all", "unset it"),
        ("off-card", {"variables": {"CUDA_VISIBLE_DEVICES": "1"}}, "fail", "hides all", "unset it"),
        (
            "other-processes",
            card(processes=(CardProcess(4711, "/usr/bin/game", 3 * GIB),)),
            "warn",
            r"/usr/bin/game \(pid 4711\) with 3.00 GiB",
            "end it",
        ),
        ("throttling", card(throttle_bits=0x40), "fail", "hardware thermal slowdown", "air"),
        ("throttling", card(throttle_bits=0x20), "fail", "software thermal slowdown", "air"),
        ("throttling", card(throttle_bits=0x80), "fail", "hardware power brake", "power cables"),
        ("throttling", card(throttle_bits=0x4), "warn", "software power cap", "nvidia-smi -pl"),
        ("throttling", card(temperature_c=90), "warn", "90 C", "cool"),
        ("pcie", card(pcie_width=4), "warn", "4 of 16 PCIe lanes", "slot"),
        ("first-call", card(persistence=False), "warn", "persistence mode", "nvidia-smi -pm 1"),
        ("first-call", {"clocks": {"powersave"}}, "warn", "powersave", "cpupower"),
        ("versions", torch(error="ImportError: libcudart.so.13"), "fail", r"libcudart\.so\.13", "again"),
        ("versions", torch(cuda=""), "fail", "built without CUDA", "index-url"),
        ("versions", card(cuda=(12, 4)), "fail", "runs CUDA 12.4 at most.*built for 13.0", "update the driver"),
        ("versions", torch(exllamav2=""), "fail", "not installed", "pip install"),
        (
            "versions",
            torch(extension_error="ImportError: undefined symbol: _ZN2at"),
            "fail",
            "undefined symbol",
            "remove",
        ),
        ("versions", {"compiler": "12.6"}, "warn", "nvcc is of CUDA 12.6", "CUDA_HOME"),
        ("kernels", card(**V100), "fail", "sm_70, torch .* has kernels for sm_75", "12.6"),
        ("kernels", {"extension": ["sm_90"]}, "fail", "extension was compiled for sm_90", "ARCH_LIST=8.9"),
        (
            "kernels",
            {"variables": {"TORCH_CUDA_ARCH_LIST": "9.0;9.0a"}},
            "fail",
            "of sm_89",
            "TORCH_CUDA_ARCH_LIST to 8.9",
        ),
    ],
)
def test_a_planted_fault_is_found(
    check: str, planted: dict[str, Any], status: str, evidence: str, remedy: str, tmp_path: Path
) -> None:
    import re

    found = look(check, tmp_path, Machine(**planted))
    assert found.status == status
    assert re.search(evidence, found.evidence), found.evidence
    assert remedy in found.remedy


def test_layers_on_the_processor_beside_a_card_are_found(tmp_path: Path) -> None:
    found = look("off-card", tmp_path, Machine(), engine="torch")
    assert found.status == "fail"
    assert "every layer runs on the processor, beside NVIDIA L4" in found.evidence
    assert look("off-card", tmp_path, Machine(), engine="fake").status == "ok"


def test_weights_in_bf16_on_a_card_without_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "BF16")
    found = look("dtype", tmp_path, Machine(**card(**V100)), model)
    assert found.status == "warn"
    assert "stored in BF16, which Tesla V100-SXM2-16GB does not have" in found.evidence
    assert look("dtype", tmp_path, Machine(), model).status == "ok"


def test_bf16_on_a_processor_without_it(tmp_path: Path) -> None:
    found = look("dtype", tmp_path, Machine(states=[], flags=set()), engine="torch", compute_dtype="bfloat16")
    assert found.status == "fail"
    assert "emulated" in found.evidence
    assert look("dtype", tmp_path, Machine(), engine="torch", compute_dtype="bfloat16").status == "ok"


@pytest.mark.parametrize("value", ["8.0 9.0+PTX", "8.6+PTX", "Ampere;Ada", "8.9"])
def test_what_runs_on_the_card_may_be_asked_for_in_other_words(value: str, tmp_path: Path) -> None:
    on = Machine(variables={"TORCH_CUDA_ARCH_LIST": value}, **card(capability=(12, 0) if "PTX" in value else (8, 9)))
    assert look("kernels", tmp_path, replace(on, extension=[])).status == "ok"


def test_machine_code_runs_on_later_cards_of_its_generation(tmp_path: Path) -> None:
    ada = Machine(extension=["sm_86"])
    assert look("kernels", tmp_path, ada).status == "ok"
    blackwell = card(name="NVIDIA GeForce RTX 5090", capability=(12, 0))
    assert look("kernels", tmp_path, Machine(extension=[], **blackwell)).status == "ok"  # by PTX
    only_code = torch(archs=["sm_90"]) | blackwell
    assert look("kernels", tmp_path, Machine(extension=[], **only_code)).status == "fail"


def test_an_engine_of_preread_on_the_card_is_no_stranger(tmp_path: Path) -> None:
    own = CardProcess(12, "python -m service.engine.remote.server", 9 * GIB)
    assert look("other-processes", tmp_path, Machine(**card(processes=(own,)))).status == "ok"


@pytest.mark.parametrize(
    ("llama", "offload", "status", "told"),
    [
        (["cuda"], "auto", "ok", "compiled for cuda"),
        (["cuda"], "none", "fail", "PREREAD_OFFLOAD=none"),
        ([], "auto", "fail", "processor alone"),
        (None, "auto", "fail", "not installed"),
    ],
)
def test_a_llama_cpp_that_cannot_use_the_card_is_seen(llama, offload, status, told, tmp_path: Path):
    found = look("off-card", tmp_path, Machine(llama=llama), engine="llamacpp", offload=offload)
    assert (found.status, told in found.evidence) == (status, True)
