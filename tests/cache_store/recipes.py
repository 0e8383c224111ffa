"""Small snapshots to damage, and the helpers that make them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cache_store.builder import SnapshotBuilder
from cache_store.disk import Disk
from cache_store.fingerprint import Fingerprint
from cache_store.keys import SnapshotKey
from cache_store.layout import KVLayout, KVType
from cache_store.manifest import Canary, Manifest
from cache_store.segments import WHOLE, Segments
from cache_store.slots import Counts, slot_layout
from cache_store.store import SnapshotStore

LAYOUT = KVLayout(n_layers=3, n_kv_heads=1, head_dim=32, kv_type=KVType.K8V4, block_tokens=8)
FINGERPRINT = Fingerprint(
    weights="w1",
    quantization="none",
    tokenizer="t1",
    template="c1",
    rope="r1",
    kv="k8v4-1",
    engine="torch-1",
    compute_dtype="float32",
    chunking="256",
)
KEY = SnapshotKey("alice", "document", "doc-1")
CANARY = Canary((5, 3, 8), (2.5, 1.25, -0.5))


RESIDENT_KEY = KEY.of_kind("resident")


def token_ids(n_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1 << 17, n_tokens).tolist()


def block_records(layout: KVLayout, n_tokens: int, seed: int = 0) -> list[list[bytes]]:
    """Random records, ``[block][layer]``: the store does not care what they mean."""
    rng = np.random.default_rng(seed + 1)
    lengths = layout.block_lengths(n_tokens)
    return [[rng.bytes(layout.record_nbytes(n)) for _ in range(layout.n_layers)] for n in lengths]


@dataclass
class Recipe:
    """A snapshot that can be built again and compared byte for byte."""

    key: SnapshotKey = KEY
    fingerprint: Fingerprint = FINGERPRINT
    layout: KVLayout = LAYOUT
    n_tokens: int = 43
    seed: int = 0
    segments: Segments = WHOLE
    next_position: int | None = None
    last_position: int | None = None
    context_digest: str = ""
    slot_counts: Counts | None = None

    @property
    def tokens(self) -> list[int]:
        return token_ids(self.n_tokens, self.seed)

    @property
    def blocks(self) -> list[list[bytes]]:
        return block_records(self.layout, self.n_tokens, self.seed)

    def begin(self, store: SnapshotStore) -> SnapshotBuilder:
        return store.begin(
            self.key,
            self.fingerprint,
            self.layout,
            self.tokens,
            context_digest=self.context_digest,
            segments=self.segments,
            next_position=self.next_position,
            last_position=self.last_position,
            slot_counts=self.slot_counts,
        )

    def build(self, store: SnapshotStore) -> Manifest:
        with self.begin(store) as builder:
            for records in self.blocks[builder.n_blocks_done :]:
                builder.append(records)
            return builder.publish(canary=CANARY)

    def read(self, store: SnapshotStore) -> list[list[bytes]]:
        """All records as ``[block][layer]``, read through the reader."""
        with store.open(self.key, self.fingerprint, self.layout, context_digest=self.context_digest) as reader:
            assert reader.token_ids.tolist() == self.tokens
            runs = [(layer, first, bytes(records), n) for layer, first, records, n in reader.layers()]
        return self.unpacked(runs)

    def unpacked(self, runs: Sequence[tuple[int, int, bytes, int]]) -> list[list[bytes]]:
        lengths = self.layout.block_lengths(self.n_tokens)
        found = [[b""] * self.layout.n_layers for _ in lengths]
        for layer, first, records, n in runs:
            at = 0
            for block, length in enumerate(self.layout.block_lengths(n), first // self.layout.block_tokens):
                nbytes = self.layout.record_nbytes(length)
                found[block][layer] = records[at : at + nbytes]
                at += nbytes
            assert at == len(records)
        return found

    def directory(self, root: Path) -> Path:
        return root.joinpath("snapshots", *self.key.parts, self.fingerprint.digest)


SEGMENTED = Recipe(segments=Segments(16, 3))
"""43 tokens in segments of 16, 16 and 11, each later one behind 3 sinks."""
RESIDENT = Recipe(key=RESIDENT_KEY, n_tokens=19, seed=3, next_position=19, last_position=13, context_digest="c")
"""Rows picked from it."""
SLOTS = Recipe(
    key=KEY.of_kind("slots"),
    layout=slot_layout(LAYOUT),
    n_tokens=128,
    seed=5,
    context_digest="c",
    slot_counts=((3,), (0,), (65,)),
)
"""Slots of the heads of its three layers: a block, none, three blocks."""


class StepDisk(Disk):
    """A disk that calls `on_step` with the name of each change before it makes it."""

    def __init__(self, on_step: Callable[[str], None]) -> None:
        self._on_step = on_step

    def make_dir(self, path: Path) -> bool:
        self._on_step("make_dir")
        return super().make_dir(path)

    def create(self, path: Path, nbytes: int) -> int:
        self._on_step("create")
        return super().create(path, nbytes)

    def write_at(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        self._on_step("write_at")
        super().write_at(fd, data, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._on_step("truncate")
        super().truncate(fd, nbytes)

    def sync_data(self, fd: int) -> None:
        self._on_step("sync_data")
        super().sync_data(fd)

    def sync_dir(self, path: Path) -> None:
        self._on_step("sync_dir")
        super().sync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._on_step("rename")
        super().rename(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        self._on_step("exchange")
        return super().exchange(one, other)

    def remove(self, path: Path) -> None:
        self._on_step("remove")
        super().remove(path)
