import logging

import pytest
import torch

from service.engine.exl2_engine import cards
from service.engine.exl2_engine.cards import check_card
from service.engine.models.errors import EngineRefused


@pytest.fixture
def machine(monkeypatch):
    """A machine with cards, as CUDA describes it."""

    def make(n=1, capability=(9, 0), exllamav2=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: n > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Card")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(cards, "find_spec", lambda _: object() if exllamav2 else None)

    return make


@pytest.mark.parametrize(
    ("what", "device", "message"),
    [
        ({"n": 0}, "cuda:0", "CUDA finds none"),
        ({"n": 2}, "cuda:1", "CUDA_VISIBLE_DEVICES=1"),
        ({"capability": (6, 1)}, "cuda:0", "sm_61, the exl2 engine needs sm_70"),
        ({"exllamav2": False}, "cuda:0", r"pip install '\.\[gpu\]'"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(machine, what, device, message):
    machine(**what)
    with pytest.raises(EngineRefused, match=message):
        check_card(torch.device(device))


def test_one_card_is_used_without_a_word_and_more_with_one(machine, caplog):
    with caplog.at_level(logging.WARNING):
        machine(n=1)
        check_card(torch.device("cuda:0"))
        assert not caplog.records
        machine(n=3)
        check_card(torch.device("cuda"))
        assert "the first of 3 cards" in caplog.text


def test_a_processor_needs_no_card(machine):
    machine(n=0)
    check_card(torch.device("cpu"))
