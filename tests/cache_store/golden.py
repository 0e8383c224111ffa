"""The golden snapshots of format version 1. ``python -m tests.cache_store.golden`` writes them anew."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cache_store.codec import encode_records
from cache_store.layout import KVLayout, KVType
from cache_store.rows import take_rows
from cache_store.segments import Segments
from cache_store.store import SnapshotStore
from tests.cache_store.recipes import CANARY, FINGERPRINT, KEY

DIRECTORY = Path(__file__).parent / "golden_v1"
WINDOWED = Path(__file__).parent / "golden_v1_windowed"
LAYOUT = KVLayout(n_layers=2, n_kv_heads=1, head_dim=32, kv_type=KVType.K8V4, block_tokens=8)
TOKENS = [(i * 7919) % 32003 for i in range(11)]
SEGMENTS = Segments(8, 2)
SLOT = 5
ROWS = [0, 1, SLOT, 9, 10]
"""Two sinks, a slot, a window of two tokens."""


@dataclass
class Clock:
    now: float = 1.75e9

    def __call__(self) -> float:
        return self.now


def golden_kv(layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values with exact binary fractions, the same on every machine."""
    steps = torch.arange(2 * 11 * 32) * 37 + layer * 11
    k, v = ((steps % 101 - 50) / 16).view(2, 1, 11, 32)
    return k, v


def write_golden(root: Path, records: list[list[bytes]]) -> None:
    """Write the golden snapshot with the given records, ``[layer][block]``, into a store at `root`."""
    store = SnapshotStore(root, clock=Clock())
    with store.begin(KEY, FINGERPRINT, LAYOUT, TOKENS) as builder:
        for block in zip(*records, strict=True):
            builder.append(block)
        builder.publish(canary=CANARY)


def write_windowed(root: Path, records: list[list[bytes]]) -> None:
    """Write the same tokens as a document in segments, ``[layer][block]``, and five rows of it."""
    store = SnapshotStore(root, clock=Clock())
    with store.begin(KEY, FINGERPRINT, LAYOUT, TOKENS, segments=SEGMENTS) as builder:
        for block in zip(*records, strict=True):
            builder.append(block)
        builder.publish(canary=CANARY)
    taken = [take_rows([memoryview(r) for r in layer], 11, LAYOUT, np.array(ROWS)) for layer in records]
    ids = [TOKENS[row] if row != SLOT else 0 for row in ROWS]
    key, digest = KEY.of_kind("resident"), "golden"
    with store.begin(
        key, FINGERPRINT, LAYOUT, ids, context_digest=digest, next_position=10, last_position=4
    ) as builder:
        for block in zip(*taken, strict=True):
            builder.append(block)
        builder.publish(canary=CANARY)


def encoded_golden() -> list[list[bytes]]:
    """The records the codec makes of the golden keys and values, ``[layer][block]``."""
    return [[bytes(r) for r in encode_records(*golden_kv(layer), LAYOUT)] for layer in range(LAYOUT.n_layers)]


if __name__ == "__main__":
    write_golden(DIRECTORY, encoded_golden())
    write_windowed(WINDOWED, encoded_golden())
