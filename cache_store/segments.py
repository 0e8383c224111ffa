"""Where a document's tokens stand: at consecutive positions, or cut into segments that share them.

A document larger than a model's context is computed in segments. The first holds tokens ``[0, S)`` at positions from 0
on. Each later one, tokens ``[kS, (k + 1)S)``, is computed behind the document's first `sink_tokens` tokens alone, and
stands at positions from `sink_tokens` on. So no position is beyond ``sink_tokens + S``, however long the document is.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from cache_store.layout import KVLayout

Count = Annotated[int, Meta(ge=1, le=1 << 31)]
Offset = Annotated[int, Meta(ge=0, le=1 << 40)]


class BlockTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Per block: the position of its first token, its segment, its number of tokens."""

    first_position: list[Offset]
    segment: list[Offset]
    n_tokens: list[Count]


@dataclass(frozen=True, slots=True)
class Segments:
    """How the tokens of a document stand. `segment_tokens` 0 is one segment at consecutive positions.

    Raises ValueError for negative numbers, and for sinks that are no part of the first segment.
    """

    segment_tokens: int = 0
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        if self.segment_tokens < 0 or self.sink_tokens < 0:
            raise ValueError("the lengths of segments and sinks are not negative")
        if self.segment_tokens and self.sink_tokens > self.segment_tokens:
            raise ValueError(f"{self.sink_tokens} sinks do not lie in a segment of {self.segment_tokens} tokens")

    def of_length(self, n_tokens: int) -> "Segments":
        """What is left of this for a document of `n_tokens` tokens: one that is a single segment has no others, so that
        its KV is the same as without any. Two documents of a length stand alike when these are equal."""
        return self if self._is_cut(n_tokens) else WHOLE

    def n_segments(self, n_tokens: int) -> int:
        return -(-n_tokens // self.segment_tokens) if self._is_cut(n_tokens) else 1

    def ranges(self, n_tokens: int) -> list[tuple[int, int]]:
        """The tokens of each segment as ``[first, last)``."""
        if not self._is_cut(n_tokens):
            return [(0, n_tokens)]
        size = self.segment_tokens
        return [(first, min(first + size, n_tokens)) for first in range(0, n_tokens, size)]

    def segment(self, token: int) -> int:
        """The segment of a token, by its place in the document."""
        return token // self.segment_tokens if self.segment_tokens else 0

    def position(self, token: int) -> int:
        """Where a token stands, by its place in the document."""
        if not self.segment(token):
            return token
        return self.sink_tokens + token % self.segment_tokens

    def next_position(self, n_tokens: int) -> int:
        """Where the first token behind the document stands: behind the longest segment, which need not be the last."""
        return self.sink_tokens + self.segment_tokens if self._is_cut(n_tokens) else n_tokens

    def last_position(self, n_tokens: int) -> int:
        """Where the document's last token stands."""
        return self.position(n_tokens - 1)

    def table(self, layout: KVLayout, n_tokens: int, first_position: int = 0) -> BlockTable:
        """The block table of a snapshot of `n_tokens` tokens, whose first token stands at `first_position`.

        Raises ValueError when a block would lie in two segments, and for several segments that do not begin at 0.
        """
        lengths = layout.block_lengths(n_tokens)
        firsts = range(0, n_tokens, layout.block_tokens)
        if not self._is_cut(n_tokens):
            return BlockTable([first_position + first for first in firsts], [0] * len(lengths), lengths)
        self.check_blocks(layout)
        if first_position:
            raise ValueError("a document in segments begins at position 0")
        return BlockTable([self.position(n) for n in firsts], [self.segment(n) for n in firsts], lengths)

    def check_blocks(self, layout: KVLayout) -> None:
        """Raises ValueError when a block could lie in two segments."""
        if self.segment_tokens % layout.block_tokens:
            raise ValueError(f"segments of {self.segment_tokens} tokens are not whole blocks of {layout.block_tokens}")

    def _is_cut(self, n_tokens: int) -> bool:
        return 0 < self.segment_tokens < n_tokens


WHOLE = Segments()
"""A document that is a single segment."""
