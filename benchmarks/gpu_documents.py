"""Documents without prefill: valid random KV in place, in memory or as a snapshot on disk. Speed does not depend on
the values, and a minute of prefill for each measured length is saved."""

from pathlib import Path
from typing import Any

import numpy as np

from cache_store.keys import SnapshotKey
from cache_store.layout import KVLayout
from cache_store.store import SnapshotStore
from service.engine.messages import DocumentRef
from service.engine.protocol import Runner

VARIETY = 32
"""Different blocks that a layer's records are made of; they repeat."""


def random_records(layout: KVLayout, n_tokens: int, seed: int = 0) -> bytearray:
    """Consecutive records of one layer: random codes, scales between 0.005 and 0.02, no value that encoding never
    gives."""
    generator = np.random.default_rng(seed)
    lengths = layout.block_lengths(n_tokens)
    n_full = sum(length == layout.block_tokens for length in lengths)
    varied = [_record(layout, layout.block_tokens, generator) for _ in range(min(n_full, VARIETY))]
    out = bytearray().join(varied[i % len(varied)] for i in range(n_full))
    if n_full < len(lengths):
        out += _record(layout, lengths[-1], generator)
    return out


def _record(layout: KVLayout, n_tokens: int, generator: np.random.Generator) -> bytes:
    parts = layout.part_nbytes(n_tokens)
    kinds = (layout.kv_type.key_bits, 0, layout.kv_type.value_bits, 0)
    return b"".join(_part(n, bits, generator) for n, bits in zip(parts, kinds, strict=True))


def _part(nbytes: int, bits: int, generator: np.random.Generator) -> bytes:
    """Codes of `bits` bits, or the scales (0)."""
    if bits == 4:
        return generator.bytes(nbytes)
    if bits == 8:
        return generator.integers(-127, 128, nbytes, dtype=np.int8).tobytes()
    if bits == 16:
        return generator.standard_normal(nbytes // 2, dtype=np.float32).astype(np.float16).tobytes()
    return generator.uniform(0.005, 0.02, nbytes // 2).astype(np.float16).tobytes()


def filled(runner: Runner, n_tokens: int, *, capacity: int = 0) -> Any:
    """A document of the runner whose first `n_tokens` tokens hold random KV, the same in every layer."""
    document = runner.new_document(max(capacity, n_tokens))
    records = random_records(runner.layout, n_tokens)
    for layer in range(runner.layout.n_layers):
        runner.load_blocks(document, layer, 0, memoryview(records), n_tokens)
    runner.finish_load(document, n_tokens)
    return document


def plant_snapshot(store: SnapshotStore, runner: Runner, ref: DocumentRef, token_ids: list[int]) -> int:
    """Publish a snapshot of random KV under a document's name, without a canary; its bytes."""
    layout = runner.layout
    records = memoryview(random_records(layout, len(token_ids)))
    key = SnapshotKey(ref.owner_id, "document", ref.document_id)
    at = 0
    with store.begin(key, runner.fingerprint, layout, token_ids) as builder:
        for length in layout.block_lengths(len(token_ids)):
            nbytes = layout.record_nbytes(length)
            builder.append([records[at : at + nbytes]] * layout.n_layers)
            at += nbytes
        return builder.publish().nbytes


def snapshot_files(root: Path, ref: DocumentRef) -> list[Path]:
    """The files of a document's snapshot, largest first."""
    files = [path for path in root.rglob("*") if path.is_file() and ref.document_id in path.parts]
    return sorted(files, key=lambda path: -path.stat().st_size)
