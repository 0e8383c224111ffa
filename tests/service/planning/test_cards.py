from dataclasses import replace
from pathlib import Path

import pytest

from service.errors import Invalid
from service.planning.cards import CARDS, named, processor, recognized, tried
from service.planning.detect import card_of, find_card
from service.planning.nvidia import CardState

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "gib", "key"),
    [
        ("Tesla V100-SXM2-16GB", 16, "v100-16"),
        ("Tesla V100-PCIE-32GB", 32, "v100-32"),
        ("Tesla T4", 15, "t4"),
        ("Tesla P40", 22, "p40"),
        ("NVIDIA GeForce RTX 3060", 12, "rtx-3060"),
        ("NVIDIA GeForce RTX 3060 Ti", 8, "rtx-3060-ti"),
        ("NVIDIA GeForce RTX 3080", 12, "rtx-3080-12"),
        ("NVIDIA GeForce RTX 3080", 10, "rtx-3080"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", 32, "rtx-5090"),
        ("NVIDIA A10", 22, "a10"),
        ("NVIDIA L4", 22, "l4"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40"),
        ("NVIDIA A100 80GB PCIe", 80, "a100-80"),
        ("NVIDIA H100 80GB HBM3", 80, "h100"),
        ("NVIDIA H100 PCIe", 80, "h100-pcie"),
        ("NVIDIA H100 NVL", 94, "h100-nvl"),
        ("NVIDIA GeForce RTX 4070 Ti", 12, "rtx-4070-ti"),
        ("NVIDIA GeForce RTX 4070 SUPER", 12, "rtx-4070-super"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16, "rtx-4070-ti-super"),
        ("NVIDIA H200", 140, "h200"),
    ],
)
def test_a_drivers_name_is_recognized(name: str, gib: int, key: str) -> None:
    card = recognized(name, gib * GIB)
    assert card is not None
    assert card.key == key


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce GTX 1080", "Quadro P2000", "NVIDIA A1000", "NVIDIA GeForce RTX 4090 Laptop GPU"]
)
def test_another_card_is_not_taken_for_a_known_one(name: str) -> None:
    assert recognized(name, 8 * GIB) is None


def test_generations_say_what_is_computed() -> None:
    assert CARDS["v100-16"].dtypes == {"fp32": True, "fp16": True, "bf16": False, "fp8": False}
    assert CARDS["rtx-3090"].dtypes["bf16"]
    assert not CARDS["rtx-3090"].dtypes["fp8"]
    assert CARDS["l4"].dtypes["fp8"]
    assert CARDS["v100-16"].architecture == "sm_70"
    assert processor(2, 1, 40, 0.1).architecture == "cpu"


def test_cards_are_found_however_they_are_written() -> None:
    assert named("RTX 3090") is named("3090") is named("rtx-3090") is CARDS["rtx-3090"]
    assert named("V100-16") is CARDS["v100-16"]
    with pytest.raises(Invalid, match="no card 'v200' in the table: it is cpu, v100-16"):
        find_card("v200")


def test_what_is_given_counts_more_than_the_table() -> None:
    card = find_card("a100-80", bandwidth_gbps=2039, memory_nbytes=79 * GIB)
    assert (card.bandwidth_gbps, card.memory_nbytes, card.free_nbytes) == (2039, 79 * GIB, 79 * GIB)


def test_the_driver_says_what_is_free() -> None:
    state = CardState(0, "NVIDIA L4", 22 * GIB, 2 * GIB, 20 * GIB, "550.54")
    assert (card_of(state).free_nbytes, card_of(state).bandwidth_gbps) == (20 * GIB, 300)


def test_a_variant_with_other_memory_has_the_bandwidth_of_its_clock() -> None:
    state = CardState(0, "Tesla V100S-PCIE-32GB", 32 * GIB, 0, 32 * GIB, "550.54", bandwidth_gbps=1134.0)
    assert card_of(state).bandwidth_gbps == 1134
    assert card_of(replace(state, bandwidth_gbps=898.0)).bandwidth_gbps == 900, "as good as the table"


def test_an_unknown_card_has_the_bandwidth_of_its_clock_or_is_asked_for() -> None:
    state = CardState(0, "NVIDIA X1", 8 * GIB, 0, 8 * GIB, "550.54", capability=(9, 9), bandwidth_gbps=512.0)
    assert (card_of(state).bandwidth_gbps, card_of(state).architecture) == (512.0, "sm_99")
    silent = CardState(0, "NVIDIA X1", 8 * GIB, 0, 8 * GIB, "550.54")
    with pytest.raises(Invalid, match="--bandwidth"):
        card_of(silent)
    assert card_of(silent, 700).bandwidth_gbps == 700


def test_this_processor_is_measured() -> None:
    card = find_card("cpu")
    assert card.is_cpu
    assert 0.1 < card.bandwidth_gbps < 5000
    assert card.fp16_tflops > 0
    assert 0 < card.free_nbytes <= card.memory_nbytes


CARDS_PAGE = (Path(__file__).parents[3] / "docs" / "cards.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        ((6, 1), "refused"),
        ((7, 0), "compiled"),
        ((7, 5), "compiled"),
        ((8, 0), "compiled"),
        ((8, 6), "compiled"),
        ((8, 9), "compiled"),
        ((9, 0), "run"),
        ((12, 0), "reasoned"),
    ],
)
def test_the_page_of_cards_says_what_the_doctor_says(capability: tuple[int, int], said: str) -> None:
    assert tried(capability) == said
    (row,) = (
        line
        for line in CARDS_PAGE.split("## Part by part")[0].splitlines()
        if line.startswith("|") and f"sm_{capability[0]}{capability[1]})" in line
        if "H100" not in line
    )
    words = {"refused": "refuses it by name", "compiled": "compiled", "run": "| run: ", "reasoned": "| reasoned: "}
    same = "as the V100" in row or "as RTX 30" in row
    assert words[said] in row or (same and said == "compiled")


def test_every_card_of_the_table_has_a_line_of_the_page() -> None:
    made = [line.split("`")[1] for line in CARDS_PAGE.splitlines() if line.startswith("| `")]
    assert made == list(CARDS)
