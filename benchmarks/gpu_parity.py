"""Whether the engine on a card predicts what it should: next-token KL against the torch engine and against itself.

    python -m benchmarks.gpu_parity [--dry] [--model DIRECTORY]

The example contract is read as a document of 3,072 tokens, prefilled in chunks, and 1,000 tokens are fed behind it:
half as rows of a question, half one by one, as decode does. KL is the mean Kullback-Leibler divergence (nats) of the
next token's distribution over those 1,001 positions. Without these limits a fast engine could be a wrong one. A
last run plants a fault (prefill without a causal mask), which these limits must find.
"""

import argparse
import functools
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_report import ROOT
from benchmarks.gpu_lib import ON_CARD, Result, Row, parse
from benchmarks.gpu_models import Want, model_dir, opened
from cache_store.layout import KVType
from service.engine.models.card import load_card
from service.engine.models.gate import KLStats, kl_stats
from service.engine.protocol import Rows, Runner
from service.engine.tokenizer import Tokenizer

TEXT = ROOT / "examples" / "contract" / "contract.md"
N_DOCUMENT = 3072
N_FED = 1000
ROWS_AT_ONCE = 100
COMPUTE_LIMIT = 2e-3
"""FP16 against FP32 arithmetic."""
EXACT_LIMIT = 5e-5
"""The same arithmetic in another order."""
KV_LIMITS = {KVType.K8V8: 3e-4, KVType.K8V4: 6e-3, KVType.K4V4: None}


def token_ids(directory: Path, n: int) -> list[int]:
    """The model's prompt before a document, then the contract, again from the start where it ends."""
    tokenizer = Tokenizer.load(directory)
    prefix = tokenizer.encode_template(load_card(directory).prompt.document_prefix)
    text = tokenizer.encode_plain(TEXT.read_text("utf-8"))
    return (prefix + text * (n // len(text) + 1))[:n]


def fed(runner: Runner, document: Any, ids: Sequence[int], singles_from: int) -> Tensor:
    """Logits after each of `ids`, the first of which is the document's last one; from `singles_from` on one by one."""
    slot = runner.new_tail()
    ends = [*range(0, singles_from, ROWS_AT_ONCE), *range(singles_from, len(ids) + 1)]
    try:
        rows = [
            runner.forward([Rows(slot, document, ids[a:b], refeed=a == 0 and document is not None)])[0].cpu()
            for a, b in itertools.pairwise(ends)
        ]
    finally:
        runner.free_tail(slot)
    return torch.cat(rows)


def behind_document(runner: Runner, ids: list[int], n_document: int, *, singles: bool = True) -> Tensor:
    """Logits behind a prefilled document: at its last token and at each later one."""
    document = runner.new_document(n_document)
    chunk = runner.limits.chunk_tokens
    try:
        for first in range(0, n_document, chunk):
            runner.prefill_chunk(document, ids[first : min(first + chunk, n_document)])
        rest = ids[n_document - 1 :]
        return fed(runner, document, rest, len(rest) // 2 if singles else len(rest))
    finally:
        runner.free_document(document)


def behind_stored(runner: Runner, blocks: list[list[memoryview]], ids: list[int], n_document: int) -> Tensor:
    """As `behind_document`, over blocks that a runner of the same layout stored; what is fed is stored nowhere."""
    layout, document = runner.layout, runner.new_document(n_document)
    try:
        for layer in range(layout.n_layers):
            records = memoryview(b"".join(block[layer] for block in blocks))
            runner.load_blocks(document, layer, 0, records, n_document)
        runner.finish_load(document, n_document)
        rest = ids[n_document - 1 :]
        return fed(runner, document, rest, len(rest) // 2)
    finally:
        runner.free_document(document)


def stored_blocks(runner: Runner, ids: list[int], n_document: int) -> list[list[memoryview]]:
    """A document's blocks as a runner stores them."""
    document, chunk = runner.new_document(n_document), runner.limits.chunk_tokens
    try:
        parts = [ids[first : min(first + chunk, n_document)] for first in range(0, n_document, chunk)]
        blocks = [block for part in parts for block in runner.prefill_chunk(document, part)]
        return [[memoryview(bytes(record)) for record in block] for block in blocks]
    finally:
        runner.free_document(document)


def without_document(runner: Runner, ids: list[int], n_document: int) -> Tensor:
    """The same positions with everything in a tail: attention over KV that was never stored in blocks."""
    return fed(runner, None, ids, len(ids))[n_document - 1 :]


def torch_reference(directory: Path, ids: list[int], n_document: int, chunk_tokens: int) -> Tensor:
    """The torch engine in FP32 with FP16 KV."""
    from service.engine.torch_engine.runner import TorchRunner

    if ON_CARD:
        torch.set_num_threads(os.cpu_count() or 1)
    runner = TorchRunner.load(
        directory,
        kv_type=KVType.FP16,
        compute_dtype="float32",
        n_slots=1,
        tail_tokens=len(ids),
        chunk_tokens=chunk_tokens,
    )
    return behind_document(runner, ids, n_document, singles=False)


@contextmanager
def mask_off(runner: Any) -> Iterator[None]:
    """Prefill in which every token of a chunk sees the whole chunk, as stock exllamav2 does without flash-attn."""
    backend, layout, real = runner.backend, runner.layout, runner.backend.prefill

    def prefill(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, blocks: Tensor, n_past: int, scale: float) -> Tensor:
        past = [torch.empty(layout.n_kv_heads, n_past, layout.head_dim, dtype=k.dtype, device=k.device) for _ in "kv"]
        if n_past:
            backend.decode(pool, blocks[: n_past // layout.block_tokens], n_past, *past)
        repeats = q.shape[1] // layout.n_kv_heads
        keys, values = (
            torch.cat((p, x.transpose(0, 1)), 1).repeat_interleave(repeats, 0)
            for p, x in zip(past, (k, v), strict=True)
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None], values[None], scale=scale
        )
        return backend.rotate(out[0].transpose(0, 1).contiguous())

    backend.prefill = prefill
    try:
        yield
    finally:
        backend.prefill = real


COPIES = {
    "GPTQ": ("gpu_gptq.py", 15, ()),
    "GPTQ (inputs in another order)": ("gpu_gptq.py", 15, ("--act-order",)),
    "EXL2": ("gpu_exl2_copy.py", 300, ("--bits", "4.0")),
}
"""Name -> the script that makes it, the seconds that takes, its options."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=os.environ.get("PREREAD_TEST_MODEL", ""))
    parser.add_argument("--kv-types", default="fp16,k8v8,k8v4,k4v4")
    parser.add_argument("--portable", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--copies", default=",".join(COPIES), help="quantized copies to compare; empty for none")


class Parity:
    """Comparisons of one model directory over one text."""

    def __init__(self, result: Result, directory: Path, arguments: argparse.Namespace) -> None:
        self.result = result
        self.directory = directory
        self.n_document, self.n_fed = (N_DOCUMENT, N_FED) if not arguments.dry else (768, 120)
        self.chunk = 2048 if not arguments.dry else 512
        self.ids = token_ids(directory, self.n_document + self.n_fed)
        self.found: dict[str, Tensor] = {}

    def want(self, kv_type: KVType, backend: str = "auto") -> Want:
        room = self.n_document + self.n_fed + 16
        return Want(kv_type, 3, room, 2 * self.n_document + 4096, backend, chunk_tokens=self.chunk)

    def measure(self, kv_type: KVType, backend: str = "auto") -> None:
        with opened(self.directory, self.want(kv_type, backend)) as open_:
            self.found[f"{kv_type} {backend}"] = behind_document(open_.runner, self.ids, self.n_document)
            if kv_type is KVType.FP16 and backend == "auto":
                self.found["tail"] = without_document(open_.runner, self.ids, self.n_document)
                with mask_off(open_.runner):
                    self.found["planted"] = behind_document(open_.runner, self.ids, self.n_document)

    def compare(self, what: str, reference: str, other: str, limit: float | None) -> None:
        """A row: KL of `other` from `reference`, both among what was measured."""
        stats = kl_stats(self.found[reference], self.found[other])
        self.result.raw[what] = stats.mean
        self.result.add(kl_row(what, stats, limit))

    def planted(self) -> None:
        stats = kl_stats(self.found["torch"], self.found["planted"])
        found = stats.mean >= COMPUTE_LIMIT
        what = "planted: prefill without a causal mask, against the torch engine"
        target = f"found: at least {COMPUTE_LIMIT:g}"
        self.result.add(Row(what, f"KL {stats.mean:.2g}", same(stats), target=target, met=found, must=True))

    def run(self, kv_types: list[KVType], *, portable: bool) -> None:
        """Everything that can be compared among these KV types; FP16 is the reference of the others."""
        attempt = self.result.attempt
        if kv_types:
            attempt("torch engine, FP32", self.reference)
        for kv_type in kv_types:
            attempt(f"{kv_type}", lambda t=kv_type: self.measure(t))
            self.compared(kv_type)
        for kv_type in (KVType.FP16, KVType.K8V4):
            if portable and kv_type in kv_types:
                attempt(f"portable {kv_type}", lambda t=kv_type: self.portable(t), needs_s=10 if ON_CARD else 0)

    def reference(self) -> None:
        self.found["torch"] = torch_reference(self.directory, self.ids, self.n_document, self.chunk)

    def compared(self, kv_type: KVType) -> None:
        """The rows of a KV type that was just measured."""
        if f"{kv_type} auto" not in self.found:
            return
        attempt = self.result.attempt
        if kv_type is KVType.FP16:
            attempt("compute dtype", lambda: self.compare(*COMPUTE, COMPUTE_LIMIT))
            attempt("FP16 KV", lambda: self.compare(*STORED, EXACT_LIMIT))
            attempt("planted fault", self.planted)
            return
        what = f"{kv_type} against FP16 KV"
        attempt(what, lambda: self.compare(what, "fp16 auto", f"{kv_type} auto", KV_LIMITS[kv_type]))

    def portable(self, kv_type: KVType) -> None:
        """Both paths over the same stored bytes; and, without a limit, each over what it stored itself: two FP16
        computations round some values of a quantized type to neighbouring codes."""
        blocks: list[list[memoryview]] = []
        for backend in ("auto", "portable"):
            with opened(self.directory, self.want(kv_type, backend)) as open_:
                blocks = blocks or stored_blocks(open_.runner, self.ids, self.n_document)
                found = behind_stored(open_.runner, blocks, self.ids, self.n_document)
                self.found[f"{kv_type} {backend} same bytes"] = found
                if backend == "portable":
                    own = behind_document(open_.runner, self.ids, self.n_document)
                    self.found[f"{kv_type} portable"] = own
        what = f"portable path against Triton over the same bytes, {kv_type}"
        self.compare(what, f"{kv_type} auto same bytes", f"{kv_type} portable same bytes", EXACT_LIMIT)
        what = f"portable path against Triton, each over its own bytes, {kv_type}"
        self.compare(what, f"{kv_type} auto", f"{kv_type} portable", None)


COMPUTE = ("exl2 engine, FP16 weights and arithmetic, FP16 KV, against the torch engine in FP32", "torch", "fp16 auto")
STORED = ("FP16 KV in blocks against attention over KV never stored", "tail", "fp16 auto")


def same(stats: KLStats) -> str:
    return f"p99 {stats.p99:.2g}, same first choice {stats.top1_agreement:.1%}, n={stats.n_positions}"


def kl_row(what: str, stats: KLStats, limit: float | None) -> Row:
    met = stats.mean < limit if limit else None
    return Row(
        what, f"KL {stats.mean:.2g}", same(stats), target=f"under {limit:g}" if limit else "", met=met, must=True
    )


def quantized(result: Result, name: str, make: Callable[[], tuple[Path, Path]], arguments: argparse.Namespace) -> None:
    """A quantized copy in the exl2 engine against its weights written out in the torch engine."""
    copy, plain = make()
    parity = Parity(result, copy, arguments)
    with opened(copy, parity.want(KVType.FP16)) as open_:
        ours = behind_document(open_.runner, parity.ids, parity.n_document)
    reference = torch_reference(plain, parity.ids, parity.n_document, parity.chunk)
    what = f"{name} copy, FP16 KV, against its weights written out in the torch engine in FP32"
    result.add(kl_row(what, kl_stats(reference, ours), COMPUTE_LIMIT))


def copied(script: str, directory: Path, target: Path, *options: str) -> tuple[Path, Path]:
    """The quantized copy and the plain one with its weights, made by a script in a process of its own."""
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, f"benchmarks/{script}", str(directory), str(target), *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    return target / script.removeprefix("gpu_").removesuffix(".py").removesuffix("_copy"), target / "plain"


def main() -> None:
    arguments = parse(__doc__, add_arguments)
    result = Result("parity", "benchmarks/gpu_parity.py", arguments)
    use_tiny = arguments.dry or not arguments.model
    directory = model_dir(arguments, "small") if use_tiny else Path(arguments.model)
    result.note(f"Model {load_card(directory).source}; the torch engine computes on the processor.")
    kv_types = [KVType(name) for name in arguments.kv_types.split(",") if name]
    Parity(result, directory, arguments).run(kv_types, portable=arguments.portable)
    if not ON_CARD:
        return
    wanted = [(name, COPIES[name]) for name in arguments.copies.split(",") if name]
    for i, (name, (script, needs_s, options)) in enumerate(wanted):
        target = Path(arguments.work) / f"copy-{i}"
        make = functools.partial(copied, script, directory.absolute(), target, *options)
        result.attempt(name, functools.partial(quantized, result, name, make, arguments), needs_s=needs_s)


if __name__ == "__main__":
    main()
