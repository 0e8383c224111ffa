"""What the measurements of windowed documents share: their sizes, the rows that stay of a document, a clock."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_documents import filled, random_records
from benchmarks.gpu_lib import Result, sync
from cache_store.layout import KVLayout
from cache_store.segments import Segments
from cache_store.slots import layer_rows, slot_layout
from service.engine.protocol import Runner

RATIO = 16
WINDOW = 512
QUESTION_TOKENS = 30
PROMPT_TOKENS = 32
"""Of the request to repeat, before the tokens that are repeated."""
HEAD_DEPTHS = (0.4, 0.5, 0.6, 0.7)
"""Where in the model the index heads are taken to be, one in each of these layers."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """In tokens: a long document and a short one, their segments and sinks, what a question fetches, and a context that
    is no document's."""

    document: int
    short: int
    segment: int
    sinks: int = 256
    fetch: int = 256
    context: int = 64

    @property
    def resident(self) -> int:
        return self.document // RATIO

    @property
    def slots(self) -> int:
        """Of a head on average, beside sinks and window, so that as many rows stay in all."""
        return max(self.resident - self.sinks - WINDOW, 32)

    def segments(self, n_document: int) -> Segments:
        return Segments(self.segment, self.sinks).of_length(n_document)


def index_heads(layout: KVLayout) -> list[tuple[int, int]]:
    return [(int(layout.n_layers * depth), i % layout.n_kv_heads) for i, depth in enumerate(HEAD_DEPTHS)]


def uneven(layout: KVLayout, mean: int, most: int) -> list[list[int]]:
    """Slots of each head of each layer, `mean` on average and `most` at most, spread as one threshold over all of them
    does: the best tenth of the heads has several times the mean."""
    weights = np.random.default_rng(7).lognormal(0.0, 1.0, (layout.n_layers, layout.n_kv_heads))
    return np.minimum(weights / weights.mean() * mean, most).astype(int).tolist()


def numbers(n: int, vocab: int, seed: int = 0) -> list[int]:
    return [(seed * 7919 + 11 + i * 37) % (vocab - 2) for i in range(n)]


def seconds(work: Callable[[], object]) -> float:
    """Of one call, the device idle before and after."""
    sync()
    started = time.perf_counter()
    work()
    sync()
    return time.perf_counter() - started


@dataclass(slots=True)
class Bench:
    """What is measured, and where files may go."""

    result: Result
    runner: Runner
    sizes: Sizes
    work: Path

    @contextmanager
    def resident(self, n_document: int) -> Iterator[Any]:
        """The rows that stay of a document of `n_document` tokens, of random KV."""
        document = filled(self.runner, self.sizes.resident)
        self._at_its_end(document, self.sizes.resident, n_document)
        try:
            yield document
        finally:
            self.runner.free_document(document)

    @contextmanager
    def with_slots(self, n_document: int) -> Iterator[tuple[Any, list[list[int]], float]]:
        """The same with slots in place of all rows but sinks and window, of random KV; how many each head of each layer
        has, and the seconds that loading them took."""
        n_rows, layout = self.sizes.sinks + WINDOW, self.runner.layout
        document = filled(self.runner, n_rows)
        try:
            counts = uneven(layout, self.sizes.slots, n_document - n_rows)
            own = slot_layout(layout)
            record = memoryview(random_records(own, max(layer_rows(counts)), seed=6))
            started = time.perf_counter()
            self.runner.new_slots(document, counts)
            for layer, n in enumerate(layer_rows(counts)):
                self.runner.load_slots(document, layer, record[: n * own.record_nbytes(1)])
            self._at_its_end(document, n_rows, n_document)
            sync()
            yield document, counts, time.perf_counter() - started
        finally:
            self.runner.free_document(document)

    def _at_its_end(self, document: Any, n_rows: int, n_document: int) -> None:
        segments = self.sizes.segments(n_document)
        places = segments.next_position(n_document), segments.last_position(n_document)
        self.runner.finish_load(document, n_rows, next_position=places[0], last_position=places[1])

    def fetched_rows(self) -> list[list[memoryview]]:
        """Rows to fetch, of random KV, as records of blocks."""
        record = memoryview(random_records(self.runner.layout, self.sizes.fetch, seed=5))
        nbytes = self.runner.layout.record_nbytes(256)
        return [[record[at : at + nbytes]] * self.runner.layout.n_layers for at in range(0, len(record), nbytes)]
