"""Who has which of llama.cpp's sequences: documents, tails of sessions, and the first ones what `order` needs."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from service.engine.llama_engine.context import LlamaContext
from service.engine.llama_engine.sizes import N_OWN
from service.engine.llama_engine.state import Bytes, KVRows, StateFormat

COPIES, GAPS, LEFT, RESERVED = range(N_OWN)
"""Sequences by which parts of others are read and written, which has no cells of its own in between; of cells between
documents; of those that tails have left; of those kept for documents that are being computed."""


@dataclass(slots=True, eq=False)
class LlamaDocument:
    """A document of `capacity` tokens, of which `n_tokens` are computed or loaded. `state`: rows that are being loaded,
    `loaded` of them in each layer. `cells`: where its rows lie or will lie; `reserved`: the first of the positions
    under which they are kept until it is computed."""

    sequence: int
    capacity: int
    loaded: list[int]
    nbytes: int
    n_tokens: int = 0
    state: Bytes | None = None
    freed: bool = False
    cells: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    reserved: int | None = None

    @property
    def next_position(self) -> int:
        return self.n_tokens

    @property
    def last_position(self) -> int:
        return self.n_tokens - 1


@dataclass(slots=True, eq=False)
class LlamaTail:
    """Tokens of a sequence behind those of `document`, whose cells it sees. `base`: where its first token stands.
    `waiting`: rows that were imported while it was not known behind which document."""

    sequence: int
    document: LlamaDocument | None = None
    base: int = 0
    n_tokens: int = 0
    waiting: list[KVRows] = field(default_factory=list)

    @property
    def n_waiting(self) -> int:
        return sum(rows.n_tokens for rows in self.waiting)

    @property
    def n_placed(self) -> int:
        """Tokens whose cells are there."""
        return self.n_tokens - self.n_waiting

    @property
    def next_position(self) -> int:
        return self.base + self.n_tokens

    def drop_waiting(self, n_tokens: int) -> None:
        """Forget waiting rows behind the first `n_tokens` of the tail."""
        kept, room = [], max(n_tokens - self.n_placed, 0)
        for rows in self.waiting:
            n = min(rows.n_tokens, room)
            room -= n
            if n:
                kept.append(KVRows(rows.keys[:, :n], rows.values[:, :n]))
        placed = min(self.n_placed, n_tokens)
        self.waiting = kept
        self.n_tokens = placed + self.n_waiting


class Cells:
    """Parts of sequences, read and written as rows."""

    def __init__(self, context: LlamaContext, form: StateFormat) -> None:
        self._context = context
        self._form = form

    def read(self, sequence: int, first: int, last: int) -> KVRows:
        """Rows at positions [first, last). Raises StateMismatch."""
        self._context.share(sequence, COPIES, first, last)
        try:
            return self._form.read(self._context.state(COPIES), first, last - first)
        finally:
            self._context.remove(COPIES)

    def append(self, sequence: int, rows: KVRows, first: int) -> None:
        """Put rows into the first empty cells, from position `first` on. Raises DecodeFailed."""
        state = self._form.new(rows.n_tokens, first)
        new = self._form.rows(state, rows.n_tokens)
        new.keys[:], new.values[:] = rows.keys, rows.values
        self.append_state(sequence, state)

    def append_state(self, sequence: int, state: Bytes) -> None:
        self._context.set_state(COPIES, state)
        self._context.share(COPIES, sequence)
        self._context.remove(COPIES)
