"""Snapshots to the card without a model: from disk, from the page cache, from host memory; each step beside its bound.

    python -m benchmarks.gpu_restore [--dry] [--kv-types k4v4,k8v4] [--tokens 131072] [--disk-tokens 32768]

A snapshot of a 27B-shaped model (64 layers, 8 KV heads of 128) is written by the store, then read by its reader, loaded
by the engine's loader and moved by its host tier, through the scheduler as in a real restore. `--memory` is a directory
in memory, which stands for the page cache; `--work` one on a real disk.
"""

import argparse
import gc
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.bench_report import plain_read
from benchmarks.gpu_decode import context_name
from benchmarks.gpu_documents import plant_snapshot, random_records, snapshot_files
from benchmarks.gpu_lib import DEVICE, ON_CARD, Result, Row, median, parse, pinned_ceiling, spread, sync
from cache_store.fingerprint import Fingerprint
from cache_store.layout import KVLayout, KVType
from cache_store.store import SnapshotStore
from service.bench.files import drop_page_cache
from service.engine.digests import digest_of
from service.engine.exl2_engine.copies import CopyStream
from service.engine.exl2_engine.host_copies import BlockCopies
from service.engine.exl2_engine.host_memory import HostMemory
from service.engine.exl2_engine.pool import BlockPool, Document
from service.engine.exl2_engine.restore import BlockLoader
from service.engine.host.context import HostContext, bring_in
from service.engine.host.host_tier import HostTier
from service.engine.host.kept import Subject
from service.engine.host.residency import ResidentDocument
from service.engine.messages import DocumentRef
from service.engine.protocol import RunnerLimits
from service.engine.scheduler.loop import Scheduler

REF = DocumentRef("bench", "document")
NAMES = ("weights", "quantization", "tokenizer", "template", "rope", "kv", "engine", "compute_dtype", "chunking")
DISK_SHARE = 0.9
PINNED_TARGET = 45e9
REPEATS = 5


class PoolRunner:
    """As much of a runner as a restore needs: a pool and what fills it."""

    def __init__(self, layout: KVLayout, n_tokens: int) -> None:
        self.layout = layout
        self.limits = RunnerLimits(n_tokens, layout.block_tokens, n_slots=1, tail_tokens=1, vocab_size=1)
        self.fingerprint = Fingerprint(**dict.fromkeys(NAMES, "bench"))
        self.pool = BlockPool(layout, layout.n_blocks(n_tokens) + 8, DEVICE)
        self.copies = CopyStream(DEVICE)
        self.loader = BlockLoader(self.pool.layers, layout, self.copies)
        self.load_buffers = self.loader.buffers

    def usable(self) -> bool:
        return True

    def new_document(self, n_tokens: int) -> Document:
        document = self.pool.take(n_tokens)
        self.loader.begin()
        return document

    def load_blocks(self, document: Document, layer: int, first_token: int, records: memoryview, n_tokens: int) -> None:
        self.loader.load(document.block_ids, layer, first_token, records, n_tokens)

    def finish_load(self, document: Document, n_tokens: int) -> None:
        self.loader.end()
        document.n_tokens = n_tokens

    def free_document(self, document: Document) -> None:
        self.loader.end()
        self.pool.give_back(document)


class Lab:
    """A runner with its scheduler and a host tier with room for one document."""

    def __init__(self, layout: KVLayout, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.ids = [(7919 * i) % 150000 for i in range(n_tokens)]
        self.runner = PoolRunner(layout, n_tokens)
        self.scheduler = Scheduler(cast(Any, self.runner))
        row = layout.record_nbytes(layout.block_tokens)
        nbytes = layout.n_blocks(n_tokens) * layout.n_layers * row
        started = time.perf_counter()
        self.memory = HostMemory(row, nbytes * 65 // 64 + (128 << 20), DEVICE)
        self.memory.wait_allocated()
        self.pinning_s = time.perf_counter() - started
        copies = BlockCopies(self.runner.pool.layers, layout, CopyStream(DEVICE), self.memory)
        self.tier = HostTier(self.scheduler, cast(Any, self.runner), copies)
        self.nbytes = n_tokens * layout.bytes_per_token

    def store(self, directory: Path) -> SnapshotStore:
        shutil.rmtree(directory, ignore_errors=True)
        return SnapshotStore(directory)

    def plant(self, store: SnapshotStore) -> int:
        return plant_snapshot(store, cast(Any, self.runner), REF, self.ids)

    @property
    def subject(self) -> Subject:
        return Subject(REF, digest_of(self.ids), self.n_tokens)

    def entry(self) -> ResidentDocument:
        return ResidentDocument(REF, digest_of(self.ids), self.n_tokens, 0, self.nbytes)

    def restored(self, store: SnapshotStore) -> tuple[ResidentDocument, float]:
        """A document from the store, and the seconds until it could be used."""
        nothing = cast(Any, None)
        context = HostContext(
            cast(Any, self.runner), self.scheduler, store, nothing, nothing, nothing, nothing, nothing, frozenset()
        )
        entry = self.entry()
        started = time.perf_counter()
        bring_in(context, self.subject, entry)
        sync()
        return entry, time.perf_counter() - started

    def free(self, entry: ResidentDocument) -> None:
        self.scheduler.run(self.runner.free_document, entry.handle)

    def close(self) -> None:
        self.tier.close()
        self.scheduler.close()
        self.runner.pool.layers.clear()
        self.runner.pool.records = torch.empty(0)
        gc.collect()
        if ON_CARD:
            torch.cuda.empty_cache()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-types", default="k4v4,k8v4")
    parser.add_argument("--tokens", type=int, default=131072, help="of the document in memory")
    parser.add_argument("--disk-tokens", type=int, default=32768, help="of the document on the disk")
    parser.add_argument("--memory", default="/dev/shm/preread-bench", help="a directory in memory")
    parser.add_argument("--readers", default="", help="also try these numbers of reading threads, with commas between")


class Measure:
    """The rows of one KV type."""

    def __init__(self, result: Result, arguments: argparse.Namespace, kv_type: KVType, pinned: float) -> None:
        self.result = result
        self.arguments = arguments
        self.layout = KVLayout(4, 2, 64, kv_type) if arguments.dry else KVLayout(64, 8, 128, kv_type)
        self.kv_type = kv_type
        self.pinned = pinned

    def in_memory(self) -> None:
        n = self.arguments.tokens
        name, lab = f"{self.kv_type}, {context_name(n)}", Lab(self.layout, n)
        directory = self._memory_directory(lab.nbytes)
        try:
            store = lab.store(directory)
            started = time.perf_counter()
            nbytes = lab.plant(store)
            self._row(f"{name}: snapshot written by the store", nbytes, [time.perf_counter() - started])
            self.page_cache(lab, store, name, directory)
            self.host_tier(lab, store, name)
        finally:
            lab.close()
            shutil.rmtree(directory, ignore_errors=True)

    def _memory_directory(self, nbytes: int) -> Path:
        """Where there is room; on a disk the files are in the page cache, having just been written."""
        wanted = Path(self.arguments.memory)
        wanted.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(wanted.parent).free > nbytes * 1.05:
            return wanted
        self.result.note(
            f"{wanted} has no room for {nbytes / 1e9:.1f} GB: the page cache of {self.arguments.work} is read"
        )
        return Path(self.arguments.work) / "restore-memory"

    def page_cache(self, lab: Lab, store: SnapshotStore, name: str, directory: Path) -> None:
        files = snapshot_files(directory, REF)
        nbytes = sum(path.stat().st_size for path in files)
        self._row(f"{name}: one thread reads the files from memory", nbytes, [plain_read(files) for _ in range(3)])
        verified = [self._verify(lab, store) for _ in range(3)]
        ring = lab.runner.load_buffers
        self._row(f"{name}: read and verified, {ring.n_readers} threads", nbytes, verified)
        self._restored(lab, store, f"{name}: restore from the page cache", nbytes)
        for n_readers in map(int, filter(None, self.arguments.readers.split(","))):
            ring.n_readers = n_readers
            self._restored(lab, store, f"{name}: restore from the page cache, {n_readers} readers", nbytes)

    def host_tier(self, lab: Lab, store: SnapshotStore, name: str) -> None:
        entry, _ = lab.restored(store)
        out, back = [], []
        for _ in range(REPEATS):
            out.append(timed(lambda entry=entry: lab.tier.keep(entry)))
            lab.free(entry)
            entry = lab.entry()
            back.append(timed(lambda entry=entry: lab.tier.bring_back(entry)))
            check(lab, entry)
            lab.tier.forget(REF)
        lab.free(entry)
        self._row(f"{name}: page-locking host memory", lab.memory.allocated_nbytes, [lab.pinning_s])
        self._row(f"{name}: from the card to host memory", lab.nbytes, out, bound=self.pinned)
        self._row(f"{name}: from host memory to the card", lab.nbytes, back, bound=self.pinned, target=PINNED_TARGET)

    def on_disk(self) -> None:
        n = self.arguments.disk_tokens
        name, lab = f"{self.kv_type}, {context_name(n)}", Lab(self.layout, n)
        directory = Path(self.arguments.work) / "restore-store"
        try:
            store = lab.store(directory)
            lab.plant(store)
            files = snapshot_files(directory, REF)
            plain, ours = [], []
            for _ in range(3):
                drop_page_cache(files)
                plain.append(plain_read(files))
                drop_page_cache(files)
                entry, seconds = lab.restored(store)
                ours.append(seconds)
                check(lab, entry)
                lab.free(entry)
            nbytes = sum(path.stat().st_size for path in files)
            self._row(f"{name}: plain read from the disk", nbytes, plain)
            bound = nbytes / median(plain)
            self._row(f"{name}: restore from the disk", nbytes, ours, bound=bound, target=DISK_SHARE * bound)
        finally:
            lab.close()
            shutil.rmtree(directory, ignore_errors=True)

    def _verify(self, lab: Lab, store: SnapshotStore) -> float:
        """Seconds to read and verify everything into the ring, nothing copied."""
        runner = lab.runner
        started = time.perf_counter()
        with store.open(lab.subject.full_key, runner.fingerprint, runner.layout) as reader:
            for piece in reader.pieces(runner.load_buffers):
                piece.release()
        return time.perf_counter() - started

    def _restored(self, lab: Lab, store: SnapshotStore, what: str, nbytes: int) -> None:
        seconds = []
        for _ in range(REPEATS):
            entry, spent = lab.restored(store)
            seconds.append(spent)
            check(lab, entry)
            lab.free(entry)
        self._row(what, nbytes, seconds, bound=self.pinned)

    def _row(self, what: str, nbytes: int, seconds: list[float], *, bound: float = 0, target: float = 0) -> None:
        speed = nbytes / median(seconds)
        self.result.raw[what] = {"nbytes": nbytes, "seconds": seconds}
        self.result.add(
            Row(
                what,
                f"{speed / 1e9:.2f} GB/s, {median(seconds) * 1e3:.0f} ms",
                f"{spread(seconds, 1e3)} ms",
                f"{bound / 1e9:.2f} GB/s ({speed / bound:.0%})" if bound else "",
                f"{nbytes / 1e9:.2f} GB",
                f"at least {target / 1e9:.2f} GB/s" if target else "",
                speed >= target if target and ON_CARD else None,
            )
        )


def timed(work: Callable[[], bool]) -> float:
    started = time.perf_counter()
    if not work():
        raise RuntimeError("there was no room for the document in host memory")
    sync()
    return time.perf_counter() - started


def check(lab: Lab, entry: ResidentDocument) -> None:
    """Compare blocks of the first, a middle and the last layer with what was written. Raises RuntimeError."""
    layout = lab.runner.layout
    nbytes = layout.record_nbytes(layout.block_tokens)
    records = torch.frombuffer(random_records(layout, min(lab.n_tokens, 4 * layout.block_tokens)), dtype=torch.uint8)
    for layer in {0, layout.n_layers // 2, layout.n_layers - 1}:
        blocks = lab.runner.pool.layers[layer][entry.handle.block_ids[: len(records) // nbytes]].cpu()
        if not torch.equal(blocks.flatten(), records[: blocks.numel()]):
            raise RuntimeError(f"layer {layer} is not what was stored")


def memory_note() -> str:
    """What was used of the card at most, and how many threads there are."""
    peak = torch.cuda.max_memory_allocated() / 1e9 if ON_CARD else 0.0
    return f"card memory used at most: {peak:.2f} GB; {threading.active_count()} threads at the end."


def main() -> None:
    arguments = parse(__doc__, add_arguments)
    if arguments.dry:
        arguments.tokens, arguments.disk_tokens = 3000, 2000
        arguments.memory = str(Path(arguments.work) / "restore-memory")
    result = Result("restore", "benchmarks/gpu_restore.py", arguments)
    pinned = pinned_ceiling()
    result.add(Row("pinned host memory to the card", f"{pinned / 1e9:.1f} GB/s"))
    for kv_type in map(KVType, arguments.kv_types.split(",")):
        measure = Measure(result, arguments, kv_type, pinned)
        result.attempt(f"{kv_type}: in memory", measure.in_memory, needs_s=40 if ON_CARD else 0)
        result.attempt(f"{kv_type}: from disk", measure.on_disk, needs_s=40 if ON_CARD else 0)
    result.note(memory_note())


if __name__ == "__main__":
    main()
