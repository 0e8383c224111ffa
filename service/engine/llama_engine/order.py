"""The order of rows in llama.cpp's cache: every sequence's by position, whatever else is there or has been.

On a processor attention sums up in the order in which rows lie in the cache, so that another order gives other last
bits. llama.cpp puts new rows into the first empty cells behind the last ones that it filled, and starts at the first
cell again when it likes: rows of a question come before those of its document, or those of a document in two runs the
second of which lies first, once other sessions have left holes. So there are no holes here. The cache is

    documents, and cells between them that wait for others | tails, and cells that they left | empty

and a cell that nobody needs any more gets another sequence in place of being emptied. Cells for a document are emptied
just before it takes them, the lowest first, with all tails out of the way, which go above it again.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import numpy as np

from service.engine.llama_engine.context import DecodeFailed, LlamaContext
from service.engine.llama_engine.places import GAPS, LEFT, RESERVED, Cells, LlamaDocument, LlamaTail
from service.engine.llama_engine.sizes import FILL_NBYTES
from service.engine.llama_engine.state import Bytes, KVRows, StateFormat

FEW_CELLS = 1024
"""Cells that tails left are taken back when they are more than this, and more than those in use: attention passes them
in every step, and tails are copied to take them back."""


class OrderedCells(Cells):
    """`sizes`: cells of documents and of tails. Whatever puts rows into the cache is counted here."""

    def __init__(self, context: LlamaContext, form: StateFormat, sizes: tuple[int, int]) -> None:
        super().__init__(context, form)
        self._taken = np.zeros(sizes[0], bool)
        self._n_cells = sum(sizes)
        self._n_reserved = self._reserved_to = 0
        self._top = 0
        """The end of the last document."""
        self._floor = self._end = 0
        """The first cell of tails, and the first empty one."""
        self.in_order = True
        """False for good when something failed while rows were elsewhere: some may be nowhere then."""

    def append(self, sequence: int, rows: KVRows, first: int) -> None:
        """Put rows of a tail above all others, from position `first` on. Raises DecodeFailed."""
        super().append(sequence, rows, first)
        self._end += rows.n_tokens

    def make_room(self, n_rows: int, n_waiting: int, tails: Collection[LlamaTail]) -> None:
        """Let the next rows that are decoded, and as many before them that are appended, be of tails: in empty cells
        above all others."""
        live = sum(tail.n_placed for tail in tails)
        n_left = self._end - self._top - live
        if self._end + n_rows + n_waiting > self._n_cells or n_left > max(FEW_CELLS, live):
            with self._moving(), self._without_tails(tails):
                pass
        self._end += n_rows

    def leave(self, sequence: int, first: int, last: int = -1) -> None:
        """A tail needs its positions [first, last) no more."""
        self._give(sequence, LEFT, first, last)

    def forget_left(self) -> None:
        """No tail has rows any more: what they left is empty, at once and without a copy."""
        self._context.remove(LEFT)
        self._end = self._floor

    def place(self, document: LlamaDocument, state: Bytes, tails: Collection[LlamaTail]) -> None:
        """Put all rows of a document into the cache. Raises DecodeFailed."""
        with self._cells_for(document, tails):
            self._context.set_state(document.sequence, state)

    def begin(self, document: LlamaDocument, rows: KVRows, tails: Collection[LlamaTail]) -> None:
        """Put its first rows into the cache; the others are computed. Raises DecodeFailed."""
        self.reserve(document, tails)
        self.take(document, 0, rows.n_tokens)
        for first in range(0, rows.n_tokens, self._step):
            part = slice(first, first + self._step)
            super().append(document.sequence, KVRows(rows.keys[:, part], rows.values[:, part]), first)

    def reserve(self, document: LlamaDocument, tails: Collection[LlamaTail]) -> None:
        """Keep cells for all rows of a document that come one after another. Raises DecodeFailed."""
        first = self._reserved_to if self._n_reserved else 0
        with self._cells_for(document, tails):
            self._fill(RESERVED, document.capacity, first)
        document.reserved = first
        self._reserved_to = first + document.capacity
        self._n_reserved += 1

    def take(self, document: LlamaDocument, first: int, last: int) -> None:
        """Empty the cells that are kept for tokens [first, last): the next rows go there, and are as many."""
        assert document.reserved is not None
        self._context.remove(RESERVED, document.reserved + first, document.reserved + last)

    def untake(self, document: LlamaDocument, first: int, last: int) -> None:
        """Keep them again, without what was computed there. Raises DecodeFailed."""
        assert document.reserved is not None
        with self._moving():
            self._context.remove(document.sequence, first)
            self._fill(RESERVED, last - first, document.reserved + first)

    def end_reservation(self, document: LlamaDocument) -> None:
        """All of its cells are taken, or nobody's."""
        if document.reserved is not None:
            self._give(RESERVED, GAPS, document.reserved, document.reserved + document.capacity)
            document.reserved = None
            self._n_reserved -= 1

    def drop(self, document: LlamaDocument) -> None:
        """Other documents may have its cells."""
        self._give(document.sequence, GAPS)
        self.end_reservation(document)
        self._taken[document.cells] = False
        self._find_top()

    def _find_top(self) -> None:
        found = np.flatnonzero(self._taken)
        self._top = int(found[-1]) + 1 if len(found) else 0

    def _give(self, sequence: int, other: int, first: int = -1, last: int = -1) -> None:
        self._context.share(sequence, other, first, last)
        self._context.remove(sequence, first, last)

    @contextmanager
    def _cells_for(self, document: LlamaDocument, tails: Collection[LlamaTail]) -> Iterator[None]:
        """In the block the lowest cells that no document has are empty, as are all others of no document."""
        cells = np.flatnonzero(~self._taken)[: document.capacity]
        if len(cells) < document.capacity:
            raise DecodeFailed(f"llama.cpp's KV cache has no room for a document of {document.capacity} tokens")
        with self._moving(), self._in_gaps() if int(cells[-1]) < self._floor else self._above_documents(tails):
            yield
            self._taken[cells] = True
            document.cells = cells
            self._find_top()

    @contextmanager
    def _moving(self) -> Iterator[None]:
        self.in_order, before = False, self.in_order
        yield
        self.in_order = before

    @contextmanager
    def _in_gaps(self) -> Iterator[None]:
        """What documents left is empty in the block; tails stay where they are."""
        self._context.remove(GAPS)
        try:
            yield
        finally:
            self._fill(GAPS, self._floor - int(self._taken.sum()), 0)

    @contextmanager
    def _above_documents(self, tails: Collection[LlamaTail]) -> Iterator[None]:
        with self._without_tails(tails):
            self._context.remove(GAPS)
            self._floor = 0
            yield

    @contextmanager
    def _without_tails(self, tails: Collection[LlamaTail]) -> Iterator[None]:
        """Tails are elsewhere in the block, and above all documents after it, without what they left."""
        aside = [
            (tail, self.read(tail.sequence, tail.base, tail.base + tail.n_placed)) for tail in tails if tail.n_placed
        ]
        for tail, _ in aside:
            self._context.remove(tail.sequence, tail.base)
        self._context.remove(LEFT)
        try:
            yield
        finally:
            self._fill_gaps()
            for tail, rows in aside:
                self.append(tail.sequence, rows, tail.base)

    def _fill_gaps(self) -> None:
        if self._top != self._floor:
            self._context.remove(GAPS)
            self._fill(GAPS, self._top - int(self._taken.sum()), 0)
        self._floor = self._end = self._top

    @property
    def _step(self) -> int:
        """Tokens of a state of `FILL_NBYTES`."""
        return max(FILL_NBYTES // self._form.layout.bytes_per_token, 1)

    def _fill(self, sequence: int, n_cells: int, first_position: int) -> None:
        """Let the first `n_cells` empty cells be a sequence's. Raises DecodeFailed."""
        for first in range(0, n_cells, self._step):
            n = min(self._step, n_cells - first)
            state = self._form.new(n, first_position + first)
            rows = self._form.rows(state, n)
            rows.keys[:] = rows.values[:] = 0
            self.append_state(sequence, state)
