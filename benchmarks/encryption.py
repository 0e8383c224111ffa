"""What encryption at rest costs: ``python -m benchmarks.encryption``.

The same snapshot is written and read, with a key and without, in turns. The figures are medians, in bytes a second."""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from cache_store.fingerprint import Fingerprint
from cache_store.keyring import KeyRing
from cache_store.keys import SnapshotKey
from cache_store.layout import KVLayout, KVType
from cache_store.store import SnapshotStore

LAYOUT = KVLayout(n_layers=32, n_kv_heads=8, head_dim=128, kv_type=KVType.K8V4)
"""That of a Llama of 8 billion parameters."""
FINGERPRINT = Fingerprint("cost", "none", "none", "none", "none", "k8v4", "cost", "none", "256")
KEY = SnapshotKey("alice", "document", "doc-1")


def measured(root: Path, keys: KeyRing | None, n_tokens: int) -> tuple[float, float, int]:
    """Seconds to write and to read a snapshot, and its bytes."""
    store = SnapshotStore(root, keys=keys)
    records = [np.random.default_rng(i).bytes(LAYOUT.record_nbytes(LAYOUT.block_tokens)) for i in range(32)]
    store.delete(KEY)
    began = time.monotonic()
    with store.begin(KEY, FINGERPRINT, LAYOUT, [7] * n_tokens) as builder:
        for _ in range(builder.n_blocks):
            builder.append(records)
        nbytes = builder.publish().nbytes
    written = time.monotonic()
    with store.open(KEY, FINGERPRINT, LAYOUT) as reader:
        for piece in reader.pieces():
            piece.release()
    return written - began, time.monotonic() - written, nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=16, help="of 256 tokens")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {"clear": [], "sealed": []}
    nbytes = 0
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(arguments.rounds):
            for name, keys in (("clear", None), ("sealed", KeyRing(os.urandom(32)))):
                *seconds, nbytes = measured(Path(directory) / name, keys, arguments.blocks * LAYOUT.block_tokens)
                times[name].append((seconds[0], seconds[1]))
    medians = {
        name: {what: nbytes / statistics.median(pair[i] for pair in of_one) for i, what in enumerate(("write", "read"))}
        for name, of_one in times.items()
    }
    print(json.dumps({"nbytes": nbytes, "bytes_per_s": medians}, indent=2))


if __name__ == "__main__":
    main()
