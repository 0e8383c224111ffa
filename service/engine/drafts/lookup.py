"""Where the tokens of an answer have stood before: in a document, or in the session itself.

Prompt lookup (Saxena, 2023): the last tokens of an answer are looked for in the text it is made from; what followed
there is a guess of what follows here. It needs no model, and a guess is always a piece of the text.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

SHORTEST = 2
"""Tokens that must agree: one alone is followed by anything."""
LONGEST = 4
"""Tokens by which places are found; more are compared there."""
COMPARED = 16
"""Tokens before a place that are compared at most."""
_CODE_BITS = 16
_CANDIDATES = 32
_NEAR = 64


class Source(Protocol):
    """Tokens that were there before."""

    def find(self, context: Sequence[int], near: int | None) -> tuple[int, int] | None:
        """The place of the token that followed where the end of `context` stood before, and how many tokens agree
        there, `COMPARED` at most; None where fewer than `SHORTEST` do. `near`: a place soon behind it is preferred."""
        ...

    def take(self, place: int, n_tokens: int) -> list[int]:
        """The tokens from `place` on, as many as there are."""
        ...


class DocumentLookup:
    """The places of a document's tokens, shared by all who ask about it; 16 bytes a token.

    Places are sorted by the four tokens before them, the last one first, so that those which agree in the last two,
    three or four tokens each lie side by side: one sorted array serves all lengths.
    """

    def __init__(self, token_ids: Sequence[int] | npt.NDArray[np.integer]) -> None:
        tokens = np.asarray(token_ids, np.int32)
        self._tokens = np.concatenate((np.full(COMPARED, -1, np.int32), tokens))
        codes = self._tokens.astype(np.uint16).astype(np.uint64)
        last = np.arange(COMPARED + SHORTEST - 1, len(self._tokens) - 1)
        keys = np.zeros(len(last), np.uint64)
        for i in range(LONGEST):
            keys = keys << np.uint64(_CODE_BITS) | codes[last - i]
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._sorted = self._keys.data  # bisect is faster on it than searchsorted for one key
        self._places = (last[order] + 1).astype(np.int32)

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._keys.nbytes + self._places.nbytes

    def find(self, context: Sequence[int], near: int | None) -> tuple[int, int] | None:
        """As `Source` says: of the places where most tokens agree one soon behind `near`, else one that is followed by
        what most of them are followed by, the last one of these."""
        within, found = (0, len(self._keys)), None
        for n in range(SHORTEST, min(LONGEST, len(context)) + 1):
            within = self._side_by_side(context, n, *within)
            if within[0] == within[1]:
                break
            found = within
        return None if found is None else self._best(found, context, near)

    def take(self, place: int, n_tokens: int) -> list[int]:
        first = place + COMPARED
        return self._tokens[first : first + n_tokens].tolist()

    def _side_by_side(self, context: Sequence[int], n: int, first: int, last: int) -> tuple[int, int]:
        """Which of the sorted places in [first, last) follow the codes of the last `n` tokens of `context`."""
        key = 0
        for token in reversed(context[len(context) - n :]):
            key = key << _CODE_BITS | (token & 0xFFFF)
        rest = (LONGEST - n) * _CODE_BITS
        begin = bisect_left(self._sorted, key << rest, first, last)
        return begin, bisect_right(self._sorted, (key << rest) + (1 << rest) - 1, begin, last)

    def _best(self, found: tuple[int, int], context: Sequence[int], near: int | None) -> tuple[int, int] | None:
        """Of some of the places, evenly spread, where they are very many."""
        first, last = found
        places = self._places[first : last : -(-(last - first) // _CANDIDATES)]
        compared = np.array(context[-COMPARED:][::-1], np.int32)
        same = self._tokens[places[:, None] - np.arange(1, len(compared) + 1)] == compared
        agree = np.logical_and.accumulate(same, 1).sum(1)
        length = int(agree.max())
        if length < SHORTEST:  # other tokens of the same codes
            return None
        return self._chosen(sorted(places[agree == length].tolist()), near) - COMPARED, length

    def _chosen(self, places: list[int], near: int | None) -> int:
        if near is not None:
            behind = bisect_left(places, near + COMPARED)
            if behind < len(places) and places[behind] <= near + COMPARED + _NEAR:
                return places[behind]
        if len(places) == 1:
            return places[0]
        following = self._tokens[places].tolist()
        likeliest = Counter(following).most_common(1)[0][0]
        return max(place for place, token in zip(places, following, strict=True) if token == likeliest)


class History:
    """The tokens of an answer so far, of which each can be looked up as soon as it is there."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._before: int | None = None
        for token in token_ids:
            self.push(token)

    def __len__(self) -> int:
        return len(self._tokens)

    def push(self, token_id: int) -> None:
        """Add a token; in constant time."""
        self._tokens.append(token_id)
        self._before, n_tokens = None, len(self._tokens)
        for n in range(min(LONGEST, n_tokens), SHORTEST - 1, -1):
            key = tuple(self._tokens[-n:])
            before = self._ends.get(key)
            self._before = before if self._before is None else self._before
            self._ends[key] = n_tokens

    def last(self, n_tokens: int) -> list[int]:
        """The last tokens, as many as there are."""
        return self._tokens[-n_tokens:] if n_tokens > 0 else []

    def find(self, context: Sequence[int], near: int | None) -> tuple[int, int] | None:
        """As `Source` says, of a `context` that ends as this does: the last place."""
        del near
        place = self._before
        if place is None:
            return None
        pairs = zip(reversed(context), reversed(self._tokens[max(place - COMPARED, 0) : place]), strict=False)
        length = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(context), place, COMPARED))
        return (place, length) if length >= SHORTEST else None

    def take(self, place: int, n_tokens: int) -> list[int]:
        return self._tokens[place : place + n_tokens]
