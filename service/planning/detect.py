"""The card, or the machine without one, that a plan is for."""

import os
import threading
import time
from dataclasses import replace

import numpy as np

from service.engine.torch_engine.ledger import machine_memory
from service.errors import Invalid
from service.planning.cards import CARDS, Card, named, processor, recognized, with_memory
from service.planning.nvidia import CardState, read_cards
from service.planning.visible import VISIBLE, visible

_COPIED_NBYTES = 32 << 20
_SQUARE = 1024
_UNKNOWN_TFLOPS = 20.0
_OFF = 0.1
"""A variant of a card whose memory is so much faster or slower than the table's is known by its driver's figure."""


def find_card(wanted: str, bandwidth_gbps: float = 0.0, memory_nbytes: int = 0) -> Card:
    """The card named `wanted`; "" takes the first one that CUDA shows, or the processor.

    What is given of bandwidth (GB/s) and memory (bytes) counts more than table and driver. Raises Invalid for a name
    that is not known, or a card of unknown bandwidth.
    """
    card = _named_card(wanted, bandwidth_gbps) if wanted else _here(bandwidth_gbps)
    if bandwidth_gbps:
        card = replace(card, bandwidth_gbps=bandwidth_gbps)
    return with_memory(card, memory_nbytes, memory_nbytes) if memory_nbytes else card


def _named_card(wanted: str, bandwidth_gbps: float) -> Card:
    if wanted.lower() == "cpu":
        return this_processor(bandwidth_gbps)
    if (card := named(wanted)) is None:
        raise Invalid(f"There is no card {wanted!r} in the table: it is cpu, {', '.join(CARDS)}.", param="card")
    return card


def _here(bandwidth_gbps: float) -> Card:
    states = read_cards()
    if shown := visible(states, os.environ):
        return card_of(shown[0], bandwidth_gbps)
    card = this_processor(bandwidth_gbps)
    return replace(card, name=f"{card.name} ({VISIBLE} hides the cards)") if states else card


def card_of(state: CardState, bandwidth_gbps: float = 0.0) -> Card:
    """A card by what its driver says. Raises Invalid when nobody knows its bandwidth."""
    if (known := recognized(state.name, state.total_nbytes)) is not None:
        bandwidth = known.bandwidth_gbps
        if state.bandwidth_gbps and abs(state.bandwidth_gbps / bandwidth - 1) > _OFF:
            bandwidth = state.bandwidth_gbps
        card = with_memory(known, state.total_nbytes, state.free_nbytes)
        return replace(card, name=state.name, bandwidth_gbps=bandwidth)
    bandwidth = bandwidth_gbps or state.bandwidth_gbps
    if not bandwidth:
        raise Invalid(
            f"The bandwidth of {state.name} is not known: give it with --bandwidth (GB/s), or name a card with --card.",
            param="bandwidth",
        )
    return Card(
        "other", state.name, state.total_nbytes, bandwidth, state.capability or (7, 0), _UNKNOWN_TFLOPS, 12.0,
        state.free_nbytes,
    )  # fmt: skip


def this_processor(bandwidth_gbps: float = 0.0) -> Card:
    """This machine's processor, measured for some tenths of a second."""
    memory = machine_memory()
    return processor(memory.total, memory.free, bandwidth_gbps or _copy_gbps(), _product_tflops())


def _copy_gbps() -> float:
    """GB/s that all cores read and write together while they copy: best of three."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pairs = [(np.ones(_COPIED_NBYTES, np.uint8), np.empty(_COPIED_NBYTES, np.uint8)) for _ in range(min(cores, 8))]
    best = 0.0
    for _ in range(3):
        threads = [threading.Thread(target=np.copyto, args=(target, source)) for source, target in pairs]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, 2 * _COPIED_NBYTES * len(pairs) / (time.perf_counter() - started) / 1e9)
    return best


def _product_tflops() -> float:
    """10^12 FP32 operations a second of a matrix product: best of three."""
    a = np.ones((_SQUARE, _SQUARE), np.float32)
    best = 0.0
    for _ in range(3):
        started = time.perf_counter()
        np.dot(a, a)
        best = max(best, 2 * _SQUARE**3 / (time.perf_counter() - started) / 1e12)
    return best
