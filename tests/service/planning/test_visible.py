"""Which cards CUDA shows, and which comes first: by its environment, not by the driver's numbers."""

import sys
from pathlib import Path

import pytest

from service.doctor.probes import SystemProbes
from service.errors import Invalid
from service.planning.detect import find_card
from service.planning.nvidia import CardState
from service.planning.visible import visible
from tests.service.doctor.machine import look
from tests.service.planning.test_nvidia import put

GIB = 1 << 30


def state(index: int, name: str, gib: int, capability: tuple[int, int], uuid: str) -> CardState:
    return CardState(index, name, gib * GIB, 0, gib * GIB, "580.65", capability=capability, uuid=uuid)


T4 = state(0, "Tesla T4", 15, (7, 5), "GPU-1111aaaa-0000")
BIG = state(1, "NVIDIA GeForce RTX 3090", 24, (8, 6), "GPU-2222bbbb-0000")
V100 = state(2, "Tesla V100-SXM2-16GB", 16, (7, 0), "GPU-2222cccc-0000")
CARDS = [T4, BIG, V100]
BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, [V100, BIG, T4]),  # the fastest first, as nothing else is said
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, [V100, BIG, T4]),
        (BUS, [T4, BIG, V100]),
        (BUS | {"CUDA_VISIBLE_DEVICES": "1"}, [BIG]),
        (BUS | {"CUDA_VISIBLE_DEVICES": " 2 , 0 "}, [V100, T4]),
        ({"CUDA_VISIBLE_DEVICES": "2"}, [T4]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
        (BUS | {"CUDA_VISIBLE_DEVICES": "1,3,0"}, [BIG]),  # nothing after a number that there is not
        (BUS | {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, [T4]),
        (BUS | {"CUDA_VISIBLE_DEVICES": "1,1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2222bbbb-0000"}, [BIG]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2222c,GPU-1"}, [V100, T4]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2222"}, []),  # of two cards
        ({"CUDA_VISIBLE_DEVICES": "GPU-3333"}, []),
    ],
)
def test_cuda_shows(environment: dict[str, str], shown: list[CardState]) -> None:
    assert [card.name for card in visible(CARDS, environment)] == [card.name for card in shown]


def test_a_card_that_is_in_no_table_is_ordered_by_its_generation() -> None:
    other = state(3, "NVIDIA X1", 48, (10, 0), "GPU-4444")
    assert visible([*CARDS, other], {})[0] == other
    assert visible([other, V100, V100], BUS)[0] == V100


def test_a_part_of_a_card_has_a_size_that_is_not_known_here() -> None:
    with pytest.raises(Invalid, match=r"a part of a card \(MIG-7\).*--memory-gb"):
        visible(CARDS, {"CUDA_VISIBLE_DEVICES": "MIG-7"})


SMI = """#!/bin/sh
line() { echo "$1, 16160, 410, 15750, 580.65, $2, 50, 0x0, 3, 3, 16, 16, Enabled, 1200, 1530, $3"; }
case "$1" in
  --query-gpu*) line "0, Tesla T4" 7.5 GPU-aaaa; line "1, Tesla V100-SXM2-16GB" 7.0 GPU-bbbb;;
  --query-compute*) echo "GPU-bbbb, 4242, /opt/other/app, 3000";;
esac
"""


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A program in place of nvidia-smi that knows a T4 and, behind it on the bus, a V100 with a process on it."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    put(tmp_path, "nvidia-smi", SMI)
    return monkeypatch


@pytest.mark.parametrize(
    ("order", "shown", "name", "status"),
    [
        ("", None, "V100", "warn"),
        ("PCI_BUS_ID", None, "T4", "ok"),
        ("PCI_BUS_ID", "1", "V100", "warn"),
        ("", "1", "T4", "ok"),
        ("", "GPU-b", "V100", "warn"),
    ],
)
def test_plan_and_doctor_look_at_the_card_that_the_engine_gets(
    two_cards: pytest.MonkeyPatch, tmp_path: Path, order: str, shown: str | None, name: str, status: str
) -> None:
    two_cards.setenv("CUDA_DEVICE_ORDER", order)
    if shown is not None:
        two_cards.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert name in find_card("").name
    found = look("other-processes", tmp_path, SystemProbes())
    assert (name in found.evidence, found.status) == (True, status)


@pytest.mark.parametrize("shown", ["", "2", "GPU-c"])
def test_hidden_cards_are_not_planned_for_and_doctor_says_so(
    two_cards: pytest.MonkeyPatch, tmp_path: Path, shown: str
) -> None:
    two_cards.setenv("CUDA_VISIBLE_DEVICES", shown)
    card = find_card("", bandwidth_gbps=20.0)
    assert (card.is_cpu, card.name) == (True, "processor (CUDA_VISIBLE_DEVICES hides the cards)")
    found = look("off-card", tmp_path, SystemProbes())
    assert (found.status, found.evidence) == ("fail", f"CUDA_VISIBLE_DEVICES={shown!r} hides all 2 cards")
    assert look("pcie", tmp_path, SystemProbes()).status == "skip"
    assert look("off-card", tmp_path, SystemProbes(), engine="torch").status == "fail"


def test_a_part_of_a_card_is_a_check_that_cannot_be_made(two_cards: pytest.MonkeyPatch, tmp_path: Path) -> None:
    two_cards.setenv("CUDA_VISIBLE_DEVICES", "MIG-GPU-b/1/0")
    found = look("throttling", tmp_path, SystemProbes())
    assert (found.status, "could not be looked at" in found.evidence) == ("skip", True)
