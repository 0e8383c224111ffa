"""Time to first token of a question over a stored document: from the card, from host memory, from disk, by prefill.

    python -m benchmarks.gpu_resume [--dry] [--kv-types k8v4,k4v4] [--tokens 131072]

Everything goes through the whole engine; the clock runs from the request to the first piece of text of a question of
30 tokens. The snapshot of the first KV type is built by prefill when there is time, else, and for the other types, it
is random KV written by the store. Before a read from disk its files are dropped from the page cache, and a plain
sequential read of the same files is timed beside it.
"""

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.bench_report import plain_read
from benchmarks.gpu_decode import context_name
from benchmarks.gpu_documents import plant_snapshot, snapshot_files
from benchmarks.gpu_engine import Engine, Request, Text, expect
from benchmarks.gpu_lib import ON_CARD, Result, Row, median, parse, pinned_ceiling, spread
from benchmarks.gpu_models import Want, model_dir, opened
from cache_store.layout import KVType
from service.bench.files import drop_page_cache
from service.engine.messages import BuildDone, BuildProgress

FIRST_TOKEN_LIMIT_S = 0.6
PINNED_TARGET = 45e9
DISK_SHARE = 0.9
STOCK_RATIO = 75
N_OTHER = 2048
REPEATS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-types", default="k8v4,k4v4")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--build", action=argparse.BooleanOptionalAction, default=True, help="build by prefill")


class Resume:
    """One engine, one long document, and a short one that takes its place on the card."""

    def __init__(self, result: Result, engine: Engine, n_tokens: int, pinned_nbytes_s: float) -> None:
        self.result = result
        self.engine = engine
        self.pinned = pinned_nbytes_s
        vocab = engine.runner.limits.vocab_size
        self.long = Text.numbered("long", n_tokens, vocab)
        self.other = Text.numbered("other", N_OTHER if ON_CARD else 512, vocab)
        self.name = f"{engine.runner.layout.kv_type}, {context_name(n_tokens)}"
        self.nbytes = n_tokens * engine.runner.layout.bytes_per_token
        self.prefill_s: float | None = None

    def build(self) -> None:
        """By prefill; the time until the last token was prefilled, and until the snapshot was on disk."""
        request = self.engine.build(self.long)
        done = expect(request, BuildDone)
        prefilled = next(at for at, e in request.events if isinstance(e, BuildProgress) and e.done >= e.total)
        self.prefill_s = prefilled - request.started
        n = done.n_tokens
        self.result.add(
            Row(
                f"{self.name}: prefilled and stored",
                f"{n / done.seconds:.0f} tok/s, {done.seconds:.1f} s",
                f"{self.prefill_s:.1f} s until all blocks were written",
                beside=f"{done.nbytes / 1e9:.2f} GB snapshot",
            )
        )

    def plant(self, text: Text) -> None:
        plant_snapshot(self.engine.store, self.engine.runner, text.ref, text.ids)

    def resident(self) -> None:
        self.engine.answered(self.long)
        self._row("the card", [self.engine.answered(self.long) for _ in range(REPEATS)], "")

    def from_host(self) -> None:
        """The short document pushes the long one off the card; the next question brings it back."""
        requests = []
        for _ in range(REPEATS + 1):
            self.engine.answered(self.other)
            requests.append(self.engine.answered(self.long))
        sources = {request.source.source for request in requests}
        if sources != {"host"}:
            where = ", ".join(sorted(sources))
            self.result.note(f"{self.name}: NOT measured from host memory, the document came from {where}.")
            return
        seconds = median([request.source.restore_ms for request in requests[1:]]) / 1e3
        speed = self.nbytes / seconds
        self.result.raw[f"{self.name} host first token s"] = self._row("pinned host memory", requests[1:], "host")
        self.result.add(
            Row(
                f"{self.name}: restore from pinned host memory",
                f"{speed / 1e9:.1f} GB/s, {seconds * 1e3:.0f} ms",
                f"n={REPEATS}",
                f"{self.pinned / 1e9:.1f} GB/s ({speed / self.pinned:.0%} reached)",
                target=f"at least {PINNED_TARGET / 1e9:.0f} GB/s",
                met=speed >= PINNED_TARGET if ON_CARD else None,
            )
        )

    def from_disk(self) -> None:
        files = snapshot_files(self.engine.directory, self.long.ref)
        requests, reads = [], []
        for _ in range(2):
            self.engine.host.release(self.long.ref)
            drop_page_cache(files)
            reads.append(plain_read(files))
            drop_page_cache(files)
            requests.append(self.engine.answered(self.long))
        sources = {request.source.source for request in requests}
        if sources != {"disk"}:
            raise RuntimeError(f"the long document came from {', '.join(sorted(sources))}, not from disk")
        self._row("disk, page cache dropped", requests, "disk")
        seconds = median([request.source.restore_ms for request in requests]) / 1e3
        nbytes = sum(path.stat().st_size for path in files)
        speed, plain = nbytes / seconds, nbytes / median(reads)
        self.result.add(
            Row(
                f"{self.name}: restore from disk",
                f"{speed / 1e9:.2f} GB/s, {seconds:.2f} s",
                f"n={len(requests)}",
                f"plain read {plain / 1e9:.2f} GB/s ({speed / plain:.0%} reached)",
                target=f"at least {DISK_SHARE:.0%} of the plain read",
                met=speed >= DISK_SHARE * plain if ON_CARD else None,
            )
        )

    def _row(self, where: str, requests: list[Request], source: str) -> float:
        """A row of times to the first token; their median."""
        samples = [request.first_token_s for request in requests]
        limited = source == "host" and ON_CARD
        parts = f"of that restore {median([r.source.restore_ms for r in requests]):.0f} ms" if source else ""
        self.result.add(
            Row(
                f"{self.name}: first token of a 30-token question, document from {where}",
                f"{median(samples) * 1e3:.0f} ms",
                f"{spread(samples, 1e3)} ms",
                beside=parts,
                target=f"under {FIRST_TOKEN_LIMIT_S * 1e3:.0f} ms" if limited else "",
                met=median(samples) < FIRST_TOKEN_LIMIT_S if limited else None,
            )
        )
        return median(samples)

    def against_prefill(self, earlier: dict) -> None:
        """The first token from host memory against prefilling the document again, ours and stock's."""
        first = self.result.raw.get(f"{self.name} host first token s")
        ours = self.prefill_s or earlier.get("prefill_long_s")
        stock = earlier.get("stock_prefill_long_s")
        if not isinstance(first, float):
            return
        if ours:
            self.result.add(
                Row(
                    f"{self.name}: re-prefill with this engine", f"{ours:.1f} s: {ours / first:.0f}x the time from host"
                )
            )
        if stock:
            ratio = stock / first
            what = f"{self.name}: re-prefill with stock exllamav2"
            figure = f"{stock:.0f} s: {ratio:.0f}x the time from host"
            target = f"at least {STOCK_RATIO}x"
            self.result.add(
                Row(what, figure, "stock's time added up, see Prefill", "", "", target, ratio >= STOCK_RATIO)
            )


def keep_in_host_memory(result: Result, runner: Any, n_tokens: int) -> None:
    """Room in pinned host memory for the long document and half of it more, allocated when this returns."""
    wanted = runner.document_nbytes(n_tokens) * 3 // 2 + (64 << 20)
    grow_machine(2 * wanted)
    started = time.perf_counter()
    runner.keep_in_host_memory(wanted)
    memory = runner.host_copies._memory
    memory.wait_allocated()
    seconds = time.perf_counter() - started
    result.note(f"{memory.allocated_nbytes / 1e9:.1f} GB of host memory were pinned in {seconds:.1f} s.")


def grow_machine(nbytes: int) -> None:
    """Some virtual machines show little memory until it is used: touch what the engine will ask for."""
    if ON_CARD and psutil.virtual_memory().available < nbytes:
        step = 1 << 30
        pieces = [np.ones(step, np.uint8) for _ in range(-(-nbytes // step))]
        pieces.clear()


def measure(result: Result, arguments: argparse.Namespace, directory: Path, kv_type: KVType, by_prefill: bool) -> None:
    n = arguments.tokens
    want = Want(kv_type, n_slots=4, tail_tokens=256, pool_tokens=n + 16384)
    if arguments.dry:
        want = Want(kv_type, n_slots=4, tail_tokens=128, pool_tokens=n + 2048, chunk_tokens=512)
    store = Path(arguments.work) / "resume-store"
    shutil.rmtree(store, ignore_errors=True)
    with opened(directory, want) as open_:
        keep_in_host_memory(result, open_.runner, n)
        budget = (n + 256) * open_.runner.layout.bytes_per_token
        engine = Engine(open_.runner, store, budget_nbytes=budget, max_batch=2)
        resume = Resume(result, engine, n, pinned_ceiling())
        try:
            prepare = resume.build if by_prefill else lambda: resume.plant(resume.long)
            if result.attempt(f"{resume.name}: snapshot", prepare):
                resume.plant(resume.other)
                result.attempt(f"{resume.name}: on the card", resume.resident)
                result.attempt(f"{resume.name}: from host memory", resume.from_host)
                result.attempt(f"{resume.name}: from disk", resume.from_disk, needs_s=60 if ON_CARD else 0)
                resume.against_prefill(earlier(arguments, "prefill"))
        finally:
            engine.close()
            shutil.rmtree(store, ignore_errors=True)


def earlier(arguments: argparse.Namespace, part: str) -> dict:
    """Raw figures of a part that ran before in the same call."""
    try:
        return json.loads((Path(arguments.out) / f"{part}.json").read_text())["raw"]
    except (OSError, ValueError, KeyError):
        return {}


def main() -> None:
    arguments = parse(__doc__, add_arguments)
    if arguments.dry:
        arguments.tokens = 1536
    result = Result("resume", "benchmarks/gpu_resume.py", arguments)
    directory = model_dir(arguments, "big")
    for i, kv_type in enumerate(map(KVType, arguments.kv_types.split(","))):
        by_prefill = arguments.build and i == 0 and (result.left_s > 170 or not ON_CARD)
        needs = 60 if ON_CARD else 0
        result.attempt(
            f"{kv_type}", lambda t=kv_type, b=by_prefill: measure(result, arguments, directory, t, b), needs_s=needs
        )


if __name__ == "__main__":
    main()
