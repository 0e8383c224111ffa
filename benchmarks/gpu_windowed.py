"""Windowed documents on the card: decode beside a short context, what a question's fetch costs, replay beside prefill.

    python -m benchmarks.gpu_windowed [--dry] [--kv-type k8v4] [--tokens 131072] [--limit-s 150]

A document of 128K tokens keeps a sixteenth of its rows on the card, at positions of a segment of 16K tokens, and 256
fetched rows stand in the tail of the one who asks. Values are random but where results are compared. What is read from
disk is a shorter snapshot: reading some blocks does not depend on how many others there are.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_decode import STEPS, WARM_UP, context_name
from benchmarks.gpu_documents import filled
from benchmarks.gpu_lib import ON_CARD, Result, Row, median, parse, spread
from benchmarks.gpu_models import Want, model_dir, opened
from benchmarks.gpu_windowed_checks import check_all
from benchmarks.gpu_windowed_compaction import Compaction
from benchmarks.gpu_windowed_engine import Whole
from benchmarks.gpu_windowed_lib import QUESTION_TOKENS, WINDOW, Bench, Sizes, numbers
from benchmarks.gpu_windowed_question import Question
from cache_store.layout import KVType
from cache_store.slots import layer_rows, slot_layout
from service.engine.protocol import Rows, Runner

SHORT_LIMIT = 0.9
FLAT_LIMIT = 0.05
ROUNDS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-type", default="k8v4")
    parser.add_argument("--tokens", type=int, default=131072, help="of the long document")


class Decode(Bench):
    """Measurements of decode steps."""

    def decode(self) -> None:
        """Steps on a short context and on resident rows of a short and of a long document, in turns."""
        n_long, n_short = self.sizes.document, self.sizes.short
        context = filled(self.runner, self.sizes.context)
        samples: dict[str, list[float]] = {"context": [], "short": [], "long": [], "slots": []}
        try:
            with (
                self.resident(n_short) as of_short,
                self.resident(n_long) as of_long,
                self.with_slots(n_long) as (of_slots, counts, load_s),
            ):
                for _ in range(ROUNDS):
                    samples["context"] += self.steps(context, fetched=False)
                    samples["short"] += self.steps(of_short, fetched=True)
                    samples["long"] += self.steps(of_long, fetched=True)
                    samples["slots"] += self.steps(of_slots, fetched=True)
        finally:
            self.runner.free_document(context)
        speed = {name: 1 / median(found) for name, found in samples.items()}
        self.result.raw["decode_tok_s"] = speed
        self.decode_rows(speed, samples)
        self.slot_rows(speed, samples, counts, load_s)

    def slot_rows(
        self, speed: dict[str, float], samples: dict[str, list[float]], counts: list[list[int]], load_s: float
    ) -> None:
        share, plain = speed["slots"] / speed["context"], speed["slots"] / speed["long"]
        flat = [n for of_layer in counts for n in of_layer]
        long = context_name(self.sizes.document)
        each = f"{sum(flat) // len(flat)} slots a head on average, {max(flat)} at most"
        self.result.add(
            Row(
                f"decode, document of {long}, {self.sizes.sinks + WINDOW} rows and {self.sizes.fetch} fetched, {each}",
                f"{speed['slots']:.1f} tok/s, {1e3 / speed['slots']:.2f} ms a step",
                f"{spread(samples['slots'], 1e3)} ms",
                beside=f"{share:.0%} of the short context's; {plain:.0%} of as many plain rows'",
                target=f"at least {SHORT_LIMIT:.0%} of it",
                met=share >= SHORT_LIMIT,
            )
        )
        nbytes = sum(layer_rows(counts)) * slot_layout(self.runner.layout).record_nbytes(1)
        figure = f"{1e3 * load_s:.0f} ms, {nbytes / load_s / 1e9:.1f} GB/s"
        self.result.add(Row(f"slots of a document of {long} from host memory, {nbytes / 1e9:.2f} GB", figure))

    def decode_rows(self, speed: dict[str, float], samples: dict[str, list[float]]) -> None:
        def figure(name: str) -> tuple[str, str]:
            return f"{speed[name]:.1f} tok/s, {1e3 / speed[name]:.2f} ms a step", f"{spread(samples[name], 1e3)} ms"

        long = context_name(self.sizes.document)
        rows = f"{self.sizes.resident} rows resident, {self.sizes.fetch} fetched"
        share = speed["long"] / speed["context"]
        self.result.add(Row(f"decode, {self.sizes.context} tokens of context", *figure("context")))
        self.result.add(
            Row(
                f"decode, document of {long}, {rows}",
                *figure("long"),
                beside=f"{share:.0%} of the short context's",
                target=f"at least {SHORT_LIMIT:.0%} of it",
                met=share >= SHORT_LIMIT,
            )
        )
        apart = speed["long"] / speed["short"] - 1
        self.result.add(
            Row(
                f"decode, document of {context_name(self.sizes.short)}, same policy",
                *figure("short"),
                beside=f"{long}: {apart:+.1%}",
                target=f"within {FLAT_LIMIT:.0%}",
                met=abs(apart) <= FLAT_LIMIT,
            )
        )

    def steps(self, document: Any, *, fetched: bool) -> list[float]:
        """Seconds of decode steps behind a question."""
        slot = self.runner.new_tail()
        try:
            if fetched:
                self.runner.import_tail(slot, self.fetched_rows(), self.sizes.fetch, fetched=True)
            self.runner.forward([Rows(slot, document, numbers(QUESTION_TOKENS, 250), logits_from=QUESTION_TOKENS - 1)])
            found = []
            for i in range(WARM_UP + STEPS):
                started = time.perf_counter()
                self.runner.forward([Rows(slot, document, [5 + i % 7])])
                found.append(time.perf_counter() - started)
            return found[WARM_UP:]
        finally:
            self.runner.free_tail(slot)


def measure(result: Result, runner: Runner, sizes: Sizes, work: Path) -> None:
    bench = (result, runner, sizes, work)
    result.attempt("comparisons", lambda: check_all(result, runner), needs_s=5)
    result.attempt("decode", Decode(*bench).decode, needs_s=10 if ON_CARD else 0)
    result.attempt("question", Question(*bench).question, needs_s=20 if ON_CARD else 0)
    result.attempt("compaction", Compaction(*bench).compaction, needs_s=25 if ON_CARD else 0)
    result.attempt("whole engine", Whole(*bench).whole, needs_s=45 if ON_CARD else 0)


def main() -> None:
    arguments = parse(__doc__, add_arguments)
    result = Result("windowed", "benchmarks/gpu_windowed.py", arguments)
    directory = model_dir(arguments, "big")
    sizes = Sizes(document=arguments.tokens, short=16384, segment=16384)
    want = Want(KVType(arguments.kv_type), n_slots=4, tail_tokens=1024, pool_tokens=4 * sizes.segment)
    if arguments.dry:
        sizes = Sizes(document=8192, short=2048, segment=1024)
        want = Want(want.kv_type, n_slots=4, tail_tokens=512, pool_tokens=8192, chunk_tokens=512)
    with opened(directory, want) as open_:
        measure(result, open_.runner, sizes, Path(arguments.work))


if __name__ == "__main__":
    main()
