"""Decode on the card, end to end: tokens a second by context, KV type and users of one document; stock beside it.

    python -m benchmarks.gpu_decode [--dry] [--kv-types k8v4,k4v4] [--contexts 64,8192,32768,131072]

A step is `Runner.forward` of one token for every user, logits on the host: what the scheduler waits for. Documents are
filled with random KV. The bound of a step is the weights and the document's KV, each read once, at the speed of a copy
on the card.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks import gpu_attention
from benchmarks.gpu_documents import filled
from benchmarks.gpu_engine import Engine, Text, expect
from benchmarks.gpu_lib import ON_CARD, Result, Row, copy_ceiling, median, parse, spread
from benchmarks.gpu_models import Opened, Want, model_dir, opened, weights_read_nbytes
from cache_store.layout import KVType
from service.engine.messages import AnswerDone, BuildDone
from service.engine.protocol import Rows, Runner

USERS = (1, 2, 4, 8)
TARGETS = {(131072, 1): 55.0, (32768, 1): 70.0, (64, 1): 85.0, (131072, 8): 250.0}
"""(context, users) -> tokens a second in total."""
STOCK_CONTEXTS = (64, 32768, 131072)
STEPS = 40
WARM_UP = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-types", default="k8v4,k4v4")
    parser.add_argument("--contexts", default="")
    parser.add_argument("--stock", action=argparse.BooleanOptionalAction, default=ON_CARD)


class Decode:
    """One runner's measurements; `stock` holds stock's tokens a second by context."""

    def __init__(self, result: Result, open_: Opened, directory: Path, copy_nbytes_s: float, stock: dict) -> None:
        self.result = result
        self.runner: Runner = open_.runner
        self.graphs = open_.set_graphs
        self.kv = str(self.runner.layout.kv_type)
        self.copy = copy_nbytes_s
        self.stock = stock
        self.weights = weights_read_nbytes(directory)

    def context(self, n_context: int, users: tuple[int, ...]) -> None:
        document = filled(self.runner, n_context)
        try:
            for n in users:
                self.users(document, n_context, n)
        finally:
            self.runner.free_document(document)

    def users(self, document: Any, n_context: int, n_users: int) -> None:
        samples = steps(self.runner, document, n_users)
        speed = n_users / median(samples)
        bound_s = (self.weights + n_context * self.runner.layout.bytes_per_token) / self.copy
        target = TARGETS.get((n_context, n_users))
        stock = self.stock.get(n_context) if n_users == 1 else None
        self.result.raw[f"{self.kv} {n_context} x{n_users}"] = speed
        self.result.add(
            Row(
                what=f"{self.kv}, {context_name(n_context)}, {users_name(n_users)}",
                figure=f"{speed:.1f} tok/s, {median(samples) * 1e3:.2f} ms a step",
                spread=f"{spread(samples, 1e3)} ms",
                bound=f"{n_users / bound_s:.0f} tok/s ({bound_s / median(samples):.0%} reached)",
                beside=f"stock, Q4 cache: {stock:.1f}: {speed / stock:.1f}x" if stock else "",
                target=f"at least {target:.0f} tok/s" if target else "",
                met=speed >= target if target else None,
            )
        )

    def without_graphs(self, n_context: int) -> None:
        """The same step run launch by launch."""
        document = filled(self.runner, n_context)
        try:
            with_graphs = median(steps(self.runner, document, 1))
            self.graphs(False)
            without = steps(self.runner, document, 1)
        finally:
            self.graphs(True)
            self.runner.free_document(document)
        what = f"{self.kv}, {context_name(n_context)}, 1 user, no CUDA graph"
        beside = f"with graphs {with_graphs * 1e3:.2f} ms: {median(without) / with_graphs:.2f}x"
        self.result.add(
            Row(what, f"{median(without) * 1e3:.2f} ms a step", f"{spread(without, 1e3)} ms", beside=beside)
        )


def steps(runner: Runner, document: Any, n_users: int, n: int = STEPS) -> list[float]:
    """Seconds of decode steps for `n_users` tails, each with a question behind the document."""
    slots = [runner.new_tail() for _ in range(n_users)]
    try:
        for slot in slots:
            runner.forward([Rows(slot, document, list(range(3, 33)), logits_from=29)])
        samples = []
        for i in range(WARM_UP + n):
            batch = [Rows(slot, document, [5 + i % 7]) for slot in slots]
            started = time.perf_counter()
            runner.forward(batch)
            samples.append(time.perf_counter() - started)
        return samples[WARM_UP:]
    finally:
        for slot in slots:
            runner.free_tail(slot)


def through_the_engine(result: Result, runner: Runner, work: Path, n_context: int, n_users: int, n_new: int) -> None:
    """Tokens a second that clients of host and scheduler see, sampling and text included. Closes the engine."""
    engine = Engine(runner, work / "store", budget_nbytes=1 << 40, max_batch=n_users)
    text = Text.numbered("decode", n_context, runner.limits.vocab_size)
    try:
        expect(engine.build(text), BuildDone)
        requests = [engine.ask(text, max_tokens=n_new) for _ in range(n_users)]
        for request in requests:
            expect(request, AnswerDone)
        times = sorted(at for request in requests for at in request.token_times)
        first = max(request.token_times[0] for request in requests)
        last = min(request.token_times[-1] for request in requests)
        n = sum(first < at <= last for at in times)
        speed = n / (last - first)
        kv = runner.layout.kv_type
        what = f"{kv}, {context_name(n_context)}, {users_name(n_users)}, through host and scheduler"
        direct = result.raw.get(f"{kv} {n_context} x{n_users}")
        beside = f"steps alone {direct:.1f}: {speed / direct:.2f}x" if isinstance(direct, float) else ""
        result.add(Row(what, f"{speed:.1f} tok/s", f"{n} tokens", beside=beside))
    finally:
        engine.close()


def context_name(n: int) -> str:
    return f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else f"{n} tokens"


def users_name(n: int) -> str:
    return "1 user" if n == 1 else f"{n} users of one document"


def measure_stock(result: Result, directory: Path, contexts: tuple[int, ...]) -> dict[int, float]:
    """Context -> stock's tokens a second; each is a row too."""
    from benchmarks.gpu_stock import Stock, tokens_s

    stock = Stock(directory, max(contexts) + 1024)
    found = {}
    try:
        for n in contexts:
            samples = stock.decode(n)
            found[n] = tokens_s(samples)
            figure = f"{found[n]:.1f} tok/s, {median(samples) * 1e3:.1f} ms a step"
            result.add(
                Row(f"stock exllamav2, Q4 cache, {context_name(n)}, 1 user", figure, f"{spread(samples, 1e3)} ms")
            )
    finally:
        stock.close()
    return found


def measure(result: Result, arguments: argparse.Namespace, directory: Path) -> None:
    contexts = (64, 512, 1024) if arguments.dry else (64, 8192, 32768, 131072)
    contexts = tuple(map(int, arguments.contexts.split(","))) if arguments.contexts else contexts
    copy = copy_ceiling()
    result.note(f"A copy on this card moves {copy / 1e9:.0f} GB/s, read and written bytes counted.")
    stock: dict[int, float] = {}
    if arguments.stock:
        wanted = tuple(n for n in STOCK_CONTEXTS if n in contexts)
        result.attempt("stock", lambda: stock.update(measure_stock(result, directory, wanted)), needs_s=30)
    for kv_type in map(KVType, arguments.kv_types.split(",")):
        result.attempt(
            f"{kv_type}",
            lambda kv_type=kv_type: measure_kv_type(result, arguments, directory, kv_type, contexts, copy, stock),
            needs_s=2 if arguments.dry else 30,
        )


def measure_kv_type(
    result: Result,
    arguments: argparse.Namespace,
    directory: Path,
    kv_type: KVType,
    contexts: tuple[int, ...],
    copy: float,
    stock: dict[int, float],
) -> None:
    want = Want(kv_type, n_slots=max(USERS) + 2, tail_tokens=512, pool_tokens=max(contexts) + 4096)
    with opened(directory, want) as open_:
        decode = Decode(result, open_, directory, copy, stock)
        for n in contexts:
            users = USERS if n == max(contexts) else (1, max(USERS))
            result.attempt(f"{kv_type} at {n}", lambda n=n, users=users: decode.context(n, users), needs_s=3)
        result.attempt(f"{kv_type} without graphs", lambda: decode.without_graphs(contexts[0]), needs_s=3)
        result.attempt(
            f"{kv_type} attention alone",
            lambda: gpu_attention.add_rows(result, open_, max(contexts), (1, max(USERS)), copy),
            needs_s=5,
        )
        n_engine = contexts[1] if len(contexts) > 1 else contexts[0]
        result.attempt(
            f"{kv_type} through the engine",
            lambda: through_the_engine(
                result, open_.runner, Path(arguments.work), n_engine, max(USERS), 40 if arguments.dry else 200
            ),
            needs_s=8 if ON_CARD else 1,
        )


def main() -> None:
    arguments = parse(__doc__, add_arguments)
    result = Result("decode", "benchmarks/gpu_decode.py", arguments)
    measure(result, arguments, model_dir(arguments, "big"))


if __name__ == "__main__":
    main()
