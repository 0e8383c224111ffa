"""A document of the runner that holds one segment of a document after another, behind the same sinks."""

from collections.abc import Callable, Sequence

import numpy as np

from cache_store.rows import take_rows
from cache_store.segments import Segments
from service.engine.host.context import HostContext
from service.engine.host.window import Window

Read = Callable[[Sequence[int]], list[list[memoryview]]]
"""Records of blocks of the document, ``[i][layer]``, verified."""

BLOCKS_AT_ONCE = 8
LOADS_AHEAD = 2 * BLOCKS_AT_ONCE


class Scratch:
    """The rows of `handle`: those of a segment behind the sinks, or of the first segment, whose part the sinks are."""

    def __init__(self, context: HostContext, segments: Segments, n_tokens: int) -> None:
        self._context = context
        self._segments = segments
        self._n_tokens = n_tokens
        self._has_sinks = False
        self.ranges = segments.ranges(n_tokens)
        self.handle = context.scheduler.run(context.runner.new_document, scratch_rows(segments, n_tokens))

    def row(self, segment: int, token: int) -> int:
        """The row of a token of a segment."""
        return token - self.ranges[segment][0] + self._n_before(segment)

    def begin(self, segment: int) -> None:
        """Forget all but the sinks, for a segment other than the first; the first must have been there."""
        if segment:
            self._context.scheduler.run(self._context.runner.keep_prefix, self.handle, self._segments.sink_tokens)
        self._has_sinks = True

    def load(self, segment: int, last: int, read: Read, check: Callable[[], None] = lambda: None) -> None:
        """Bring the tokens of a segment up to `last` into place, and the sinks where they are not there yet.

        `check` is called between blocks and may raise to give up. Raises what `read` and the runner raise.
        """
        if segment and not self._has_sinks:
            self._load_sinks(read)
        self.begin(segment)
        first = self.ranges[segment][0]
        if first < last:
            self._load_tokens(first, last, self._n_before(segment), read, check)
            self._finish(self.row(segment, last))

    def _n_before(self, segment: int) -> int:
        return self._segments.sink_tokens if segment else 0

    def _load_sinks(self, read: Read) -> None:
        layout, n_sinks = self._context.runner.layout, self._segments.sink_tokens
        records = read(range(layout.n_blocks(n_sinks)))
        n_tokens = min(len(records) * layout.block_tokens, self._n_tokens)
        by_layer = [list(of_layer) for of_layer in zip(*records, strict=True)]
        taken = [take_rows(of_layer, n_tokens, layout, np.arange(n_sinks)) for of_layer in by_layer]
        loads, at = Window(LOADS_AHEAD), 0
        for block, length in zip(zip(*taken, strict=True), layout.block_lengths(n_sinks), strict=True):
            self._load_block(loads, at, block, length)
            at += length
        loads.finish()
        self._finish(n_sinks)

    def _load_tokens(self, first: int, last: int, row: int, read: Read, check: Callable[[], None]) -> None:
        layout, loads = self._context.runner.layout, Window(LOADS_AHEAD)
        size = layout.block_tokens
        blocks = range(first // size, layout.n_blocks(last))
        for at in range(0, len(blocks), BLOCKS_AT_ONCE):
            group = blocks[at : at + BLOCKS_AT_ONCE]
            for block, records in zip(group, read(group), strict=True):
                check()
                n_tokens = min(size, self._n_tokens - block * size)
                self._load_block(loads, row + block * size - first, records, n_tokens)
        loads.finish()

    def _load_block(self, loads: Window, row: int, records: Sequence[memoryview], n_tokens: int) -> None:
        runner = self._context.runner

        def load() -> None:
            for layer, record in enumerate(records):
                runner.load_blocks(self.handle, layer, row, record, n_tokens)

        loads.add(self._context.scheduler.call(load))

    def _finish(self, n_rows: int) -> None:
        self._context.scheduler.run(self._context.runner.finish_load, self.handle, n_rows)


def scratch_rows(segments: Segments, n_tokens: int) -> int:
    """Rows of the largest segment of a document behind its sinks."""
    return segments.next_position(n_tokens)
