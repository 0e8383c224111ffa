"""Checks with more than one problem tell all of them, and one that ends with an error takes no other with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from service.doctor.examine import CHECKS, examine
from service.engine.models.card import save_card
from service.planning.nvidia import CardState
from tests.service.doctor.machine import CARD, REDIS, TORCH, Machine, look, settings, write_model
from tests.service.doctor.planted import model_card

ONE = {"redis_url": "redis://10.0.0.5:6379/0", "fleet_url": "redis://10.0.0.5:6379/1"}
TWO = {"redis_url": "redis://10.0.0.5:6379/0", "fleet_url": "redis://10.0.0.6:6379/0"}
UNBOUND = replace(REDIS, maxmemory=0)
LRU = replace(REDIS, policy="allkeys-lru")


class Odd(Machine):
    """Its cards cannot be asked, for a reason that nobody foresaw."""

    def cards(self) -> list[CardState]:
        raise ValueError("an odd card")


def test_a_check_that_raises_is_a_finding_and_the_others_go_on(tmp_path: Path) -> None:
    found = examine(settings(tmp_path), Odd(), model_dir=write_model(tmp_path / "m"))
    by_check = {finding.check: finding for finding in found.findings}
    assert set(by_check) == set(CHECKS)
    assert by_check["throttling"].status == "warn"
    assert by_check["throttling"].evidence == "the check throttling ended with ValueError: an odd card"
    assert by_check["throttling"].remedy
    assert by_check["threads"].status == "ok"
    assert look("throttling", tmp_path, Machine()).status == "ok"


def test_a_model_whose_head_dim_no_kv_type_has_is_told_beside_all_others(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", head_dim=48)
    found = {f.check: f for f in examine(settings(tmp_path), Machine(), model_dir=model).findings}
    assert set(found) == set(CHECKS)
    assert "48" in found["cache-size"].evidence
    assert found["threads"].status == "ok"


def test_a_full_disk_is_told_whether_or_not_there_is_a_plan(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    assert look("disk-room", tmp_path, Odd(), model, free_floor_bytes=1 << 60).status == "fail"
    assert look("disk-room", tmp_path, Odd(), model).status == "warn"
    assert look("disk-room", tmp_path, Machine(), model).status == "ok"


def test_a_budget_counts_for_a_fleet_on_the_same_server(tmp_path: Path) -> None:
    machine = Machine(found=UNBOUND)
    found = look("redis-memory", tmp_path, machine, redis_budget_bytes=1 << 30, **ONE)
    assert (found.status, found.evidence) == (
        "ok", "PREREAD_REDIS_URL and PREREAD_FLEET_URL: 1.0 GiB, noeviction",
    )  # fmt: skip
    without = look("redis-memory", tmp_path, machine, **ONE)
    assert without.status == "fail"
    assert without.evidence.startswith("PREREAD_REDIS_URL and PREREAD_FLEET_URL: maxmemory is 0, and there is no")
    plain = {"redis_url": "redis://:secret@Here/0", "fleet_url": "redis://here:6379/1"}
    assert look("redis-memory", tmp_path, machine, redis_budget_bytes=1 << 30, **plain).status == "ok"


def test_a_budget_is_not_of_a_fleet_on_another_server(tmp_path: Path) -> None:
    machine = Machine(found=UNBOUND)
    found = look("redis-memory", tmp_path, machine, redis_budget_bytes=1 << 30, **TWO)
    assert found.status == "fail"
    assert found.evidence == "PREREAD_FLEET_URL: maxmemory is 0: it grows until the machine has no memory left"
    assert look("redis-memory", tmp_path, machine, fleet_url=TWO["fleet_url"]).evidence == found.evidence
    assert look("redis-memory", tmp_path, Machine(), **TWO).status == "ok"


def test_the_worst_of_two_redis_is_told_with_the_other(tmp_path: Path) -> None:
    machine = Machine(found_at={TWO["redis_url"]: LRU, TWO["fleet_url"]: UNBOUND})
    found = look("redis-memory", tmp_path, machine, **TWO)
    assert found.status == "fail"
    assert found.evidence.startswith("PREREAD_FLEET_URL: maxmemory is 0")
    assert "PREREAD_REDIS_URL: maxmemory-policy is allkeys-lru" in found.evidence
    assert "set maxmemory in" in found.remedy
    assert "noeviction" in found.remedy
    both = look("redis-memory", tmp_path, Machine(found=replace(LRU, maxmemory=0)), **ONE)
    assert (both.status, "allkeys-lru" in both.evidence) == ("fail", True)


def test_both_redis_that_write_to_a_disk_are_told(tmp_path: Path) -> None:
    machine = Machine(found_at={TWO["redis_url"]: replace(REDIS, appendonly=True)}, found=replace(REDIS, save="60 1"))
    found = look("redis-persistence", tmp_path, machine, **TWO)
    assert found.status == "warn"
    assert "PREREAD_REDIS_URL: appendonly is yes; PREREAD_FLEET_URL: save is '60 1'" in found.evidence
    assert look("redis-persistence", tmp_path, Machine(), **TWO).status == "ok"


@pytest.mark.parametrize(
    ("check", "planted", "status", "evidence"),
    [
        (
            "first-call",
            {"states": [replace(CARD, persistence=False)], "clocks": {"powersave"}},
            "warn",
            ("persistence mode", "powersave"),
        ),
        (
            "versions",
            {
                "states": [replace(CARD, cuda=(12, 4))],
                "installed": msgspec.structs.replace(TORCH, exllamav2=""),
                "compiler": "12.4",
            },
            "fail",
            ("runs CUDA 12.4 at most", "exllamav2 is not installed", "nvcc is of CUDA 12.4"),
        ),
        (
            "kernels",
            {
                "installed": msgspec.structs.replace(TORCH, archs=["sm_90"]),
                "extension": ["sm_90"],
                "variables": {"TORCH_CUDA_ARCH_LIST": "9.0"},
            },
            "fail",
            ("has kernels for sm_90", "extension was compiled for sm_90", "TORCH_CUDA_ARCH_LIST=9.0"),
        ),
    ],
)
def test_all_problems_of_a_check_are_told(
    check: str, planted: dict[str, Any], status: str, evidence: tuple[str, ...], tmp_path: Path
) -> None:
    found = look(check, tmp_path, Machine(**planted))
    assert found.status == status
    assert [text for text in evidence if text not in found.evidence] == []
    assert look(check, tmp_path, Machine()).status == "ok"


def test_all_reasons_why_a_plan_does_not_fit_are_told(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", model_type="mamba", max_position_embeddings=16_000_000)
    found = look("cache-size", tmp_path, Machine(), model, max_context=16_000_000)
    assert found.status == "fail"
    assert "mamba" in found.evidence
    assert "16,000,000 tokens of documents do not fit" in found.evidence


def test_a_model_of_another_engine_in_a_kv_type_not_measured(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    save_card(msgspec.structs.replace(model_card(model), kv_types={}), model)
    found = look("model", tmp_path, Machine(), model, engine="llamacpp", kv_type="k8v8")
    assert found.status == "fail"
    assert "reads GGUF files" in found.evidence
    assert "k8v8 was not measured" in found.evidence
