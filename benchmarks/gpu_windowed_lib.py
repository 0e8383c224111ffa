"""What the measurements of windowed documents share: their sizes, the rows that stay of a document, a clock."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_documents import filled, random_records
from benchmarks.gpu_lib import Result, sync
from cache_store.layout import KVLayout
from cache_store.segments import Segments
from service.engine.protocol import Runner

RATIO = 16
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

    def segments(self, n_document: int) -> Segments:
        return Segments(self.segment, self.sinks).of_length(n_document)


def index_heads(layout: KVLayout) -> list[tuple[int, int]]:
    return [(int(layout.n_layers * depth), i % layout.n_kv_heads) for i, depth in enumerate(HEAD_DEPTHS)]


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
        segments = self.sizes.segments(n_document)
        places = segments.next_position(n_document), segments.last_position(n_document)
        self.runner.finish_load(document, self.sizes.resident, next_position=places[0], last_position=places[1])
        try:
            yield document
        finally:
            self.runner.free_document(document)

    def fetched_rows(self) -> list[list[memoryview]]:
        """Rows to fetch, of random KV, as records of blocks."""
        record = memoryview(random_records(self.runner.layout, self.sizes.fetch, seed=5))
        nbytes = self.runner.layout.record_nbytes(256)
        return [[record[at : at + nbytes]] * self.runner.layout.n_layers for at in range(0, len(record), nbytes)]
