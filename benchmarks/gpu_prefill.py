"""Prefill on the card: tokens a second at 8K and over 128K, what exporting the blocks costs, stock beside it.

    python -m benchmarks.gpu_prefill [--dry] [--kv-type k8v4] [--tokens 131072]

A whole document is prefilled when there is time for it. Chunks behind 0 to 126K tokens of random KV are timed in any
case: they show how the cost of a chunk grows, and add up to the whole. Stock computes in chunks of its own choosing.
The bound is the arithmetic (matrix products and causal attention) at the speed of a large FP16 product on this card.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu_ceilings import matmul_ceiling
from benchmarks.gpu_decode import context_name
from benchmarks.gpu_documents import filled
from benchmarks.gpu_lib import ON_CARD, Result, Row, median, parse, spread, sync
from benchmarks.gpu_models import Want, model_dir, opened
from benchmarks.gpu_stock import DEPTHS, Stock, integrated_s
from cache_store.layout import KVType
from service.engine.models.card import ModelCard, load_card
from service.engine.protocol import Runner

TARGET_8K = 6500.0
TARGET_128K = 2500.0
EXPORT_LIMIT = 0.05
REPEATS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-type", default="k8v4")
    parser.add_argument("--tokens", type=int, default=131072, help="of the long document")
    parser.add_argument("--stock", action=argparse.BooleanOptionalAction, default=ON_CARD)


class Prefill:
    """Measurements on one runner; `flops` is the floating-point operations a second of a large product."""

    def __init__(self, result: Result, runner: Runner, card: ModelCard, n_long: int, flops: float) -> None:
        self.result = result
        self.runner = runner
        self.card = card
        self.n_long = n_long
        self.flops = flops
        self.chunk = runner.limits.chunk_tokens
        self.n_short = min(8192, n_long // 2 // self.chunk * self.chunk)

    def short(self) -> float:
        """Tokens a second of a document of 8K, blocks exported."""
        samples = [self.document_s(self.n_short) for _ in range(REPEATS + 1)][1:]
        speed = self.n_short / median(samples)
        bound = self.n_short / self.arithmetic_s(self.n_short)
        self.result.add(
            Row(
                f"prefill of {context_name(self.n_short)}, blocks exported",
                f"{speed:.0f} tok/s",
                f"{spread(samples)} s",
                f"{bound:.0f} tok/s ({speed / bound:.0%} reached)",
                target=f"at least {TARGET_8K:.0f} tok/s",
                met=speed >= TARGET_8K,
            )
        )
        return speed

    def document_s(self, n_tokens: int) -> float:
        """Seconds to prefill a new document."""
        document = self.runner.new_document(n_tokens)
        ids = [(i * 37 + 11) % (self.card.vocab_size - 2) for i in range(n_tokens)]
        try:
            sync()
            started = time.perf_counter()
            for first in range(0, n_tokens, self.chunk):
                self.runner.prefill_chunk(document, ids[first : first + self.chunk])
            sync()
            return time.perf_counter() - started
        finally:
            self.runner.free_document(document)

    def chunk_s(self, document: Any, n_past: int) -> float:
        """Seconds of one chunk behind `n_past` tokens that are there already."""
        self.runner.finish_load(document, n_past)
        ids = [(i * 41 + 7) % (self.card.vocab_size - 2) for i in range(self.chunk)]
        sync()
        started = time.perf_counter()
        self.runner.prefill_chunk(document, ids)
        sync()
        return time.perf_counter() - started

    def sampled(self) -> float:
        """Seconds of the long document, added up from chunks timed at several depths."""
        last = (self.n_long // self.chunk - 1) * self.chunk
        depths = sorted({min(round(self.n_long * share / self.chunk) * self.chunk, last) for share in SHARES})
        document = filled(self.runner, last, capacity=last + self.chunk)
        samples: list[tuple[int, float]] = []
        try:
            self.chunk_s(document, 0)
            for depth in depths:
                seconds = min(self.chunk_s(document, depth) for _ in range(2))
                samples.append((depth, seconds / self.chunk))
                self.result.add(
                    Row(f"chunk of {self.chunk} behind {depth} tokens", f"{seconds * 1e3:.1f} ms", "best of 2")
                )
        finally:
            self.runner.free_document(document)
        return integrated_s(samples, self.n_long)

    def long(self) -> None:
        """The whole long document; from samples only when there is no time for it."""
        expected = self.sampled()
        self.result.raw["prefill_long_sampled_s"] = expected
        whole = None
        if self.result.left_s > 1.3 * expected + 20:
            whole = self.document_s(self.n_long)
        seconds = whole or expected
        self.result.raw["prefill_long_s"] = seconds
        speed, bound = self.n_long / seconds, self.n_long / self.arithmetic_s(self.n_long)
        how = "one run of the whole" if whole else "NOT run whole: added up from the chunks above"
        self.result.add(
            Row(
                f"prefill of {context_name(self.n_long)}, average",
                f"{speed:.0f} tok/s, {seconds:.1f} s",
                how,
                f"{bound:.0f} tok/s ({speed / bound:.0%} reached)",
                f"the chunks above add up to {self.n_long / expected:.0f} tok/s",
                f"at least {TARGET_128K:.0f} tok/s",
                speed >= TARGET_128K,
            )
        )

    def export_cost(self) -> None:
        """The same prefill with and without its blocks leaving the card, in turns."""
        self.document_s(self.n_short)
        pairs = []
        for _ in range(REPEATS + 1):
            exported = self.document_s(self.n_short)
            with no_export():
                pairs.append((exported, self.document_s(self.n_short)))
        cost = median([a for a, _ in pairs]) / median([b for _, b in pairs]) - 1
        self.result.add(
            Row(
                f"cost of exporting the blocks, prefill of {context_name(self.n_short)}",
                f"{cost:+.1%}",
                f"with {spread([a for a, _ in pairs])}; without {spread([b for _, b in pairs])} s",
                target=f"under {EXPORT_LIMIT:.0%}",
                met=cost < EXPORT_LIMIT,
            )
        )

    def arithmetic_s(self, n_tokens: int) -> float:
        """Seconds of the operations alone: two for each weight and token, and causal attention."""
        card = self.card
        embedding = 2 * card.vocab_size * _hidden(card)
        dense = 2.0 * max(card.n_parameters - embedding, 1) * n_tokens
        attention = 2.0 * n_tokens**2 * card.n_heads * card.head_dim * card.n_layers
        return (dense + attention) / self.flops


SHARES = (0, 0.0625, 0.125, 0.25, 0.5, 0.75, 1)
"""Where in the long document chunks are timed."""


def _hidden(card: ModelCard) -> int:
    """Near enough for the bound: the size of the residual stream of all architectures measured here."""
    return card.n_heads * card.head_dim


@contextmanager
def no_export() -> Iterator[None]:
    """Prefill that keeps its blocks on the card: the export is replaced by nothing."""
    from service.engine.exl2_engine import runner as module

    class Nothing:
        def __init__(self, *_: object) -> None:
            pass

        def add(self, *_: object) -> None:
            pass

        def finish(self) -> list:
            sync()
            return []

    real, module.Export = module.Export, Nothing  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        module.Export = real  # type: ignore[misc]


def measure_stock(result: Result, directory: Path, n_short: int, n_long: int) -> None:
    """Stock's prefill at 8K, and its whole long document added up from chunks at several depths."""
    stock = Stock(directory, n_long + 64)
    try:
        stock.prefill_s(0, 2048)
        seconds = min(stock.prefill_s(0, n_short) for _ in range(2))
        result.add(Row(f"stock prefill of {context_name(n_short)}", f"{n_short / seconds:.0f} tok/s", "best of 2"))
        samples = [(depth, stock.seconds_per_token(depth)) for depth in DEPTHS if depth < n_long]
    finally:
        stock.close()
    whole = integrated_s(samples, n_long)
    result.raw["stock_prefill_long_s"] = whole
    places = ", ".join(f"{1 / cost:.0f} tok/s behind {depth}" for depth, cost in samples)
    result.add(
        Row(
            f"stock prefill of {context_name(n_long)}",
            f"{n_long / whole:.0f} tok/s, {whole:.0f} s",
            "NOT run whole: added up from some of its chunks at each depth",
            beside=places,
        )
    )


def measure(result: Result, runner: Runner, directory: Path, n_long: int, flops: float) -> None:
    """All of one runner. `flops`: floating-point operations a second of a large product."""
    prefill = Prefill(result, runner, load_card(directory), n_long, flops)
    result.attempt("prefill of 8K", prefill.short, needs_s=5 if ON_CARD else 0)
    result.attempt("cost of exporting", prefill.export_cost, needs_s=10 if ON_CARD else 0)
    result.attempt("long prefill", prefill.long, needs_s=20 if ON_CARD else 0)


def main() -> None:
    arguments = parse(__doc__, add_arguments)
    result = Result("prefill", "benchmarks/gpu_prefill.py", arguments)
    directory = model_dir(arguments, "big")
    n_long = 2048 if arguments.dry else arguments.tokens
    if arguments.stock:
        result.attempt("stock", lambda: measure_stock(result, directory, 8192, n_long), needs_s=45)
    want = Want(KVType(arguments.kv_type), n_slots=2, tail_tokens=512, pool_tokens=n_long + 20480, graphs=False)
    if arguments.dry:
        want = Want(KVType(arguments.kv_type), n_slots=2, tail_tokens=128, pool_tokens=8192, chunk_tokens=512)
    with opened(directory, want) as open_:
        measure(result, open_.runner, directory, n_long, matmul_ceiling(8192 if ON_CARD else 256))


if __name__ == "__main__":
    main()
