"""Whether a span says something that those before it do not: other words of the question look at it.

Passages that only look alike are looked at by the same words, and less than the right one; what a question asks besides
is looked at by others. So a span is worth what it adds to the sum, over the rows of the question, of the most that each
row gives to anything taken: facility location, whose greedy choice is a good one since it is submodular (Lin and
Bilmes, "A class of submodular functions for document summarization", 2011).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from service.engine.fetch.index import SPAN_TOKENS, Look


class Coverage:
    """What each row of a question has been given by what was taken from some documents."""

    def __init__(self, looks: Sequence[Look]) -> None:
        self._rows = [look.rows for look in looks]
        self._columns = [{int(place): i for i, place in enumerate(look.places)} for look in looks]
        self._most = torch.zeros(max((len(rows) for rows in self._rows), default=0))

    def gain(self, document: int, place: int) -> float:
        """What a span would add, at most its figure (of a look made by `both`, those of the two in sum); 0 for one of
        which the rows are not known."""
        column = self._columns[document].get(place)
        if column is None:
            return 0.0
        return float((self._rows[document][:, column] - self._most).clamp_min(0).sum())

    def take(self, document: int, first: int, last: int) -> None:
        """Tokens ``[first, last)`` of a document were taken."""
        columns = self._columns[document]
        inside = [columns[at] for at in range(first // SPAN_TOKENS, -(-last // SPAN_TOKENS)) if at in columns]
        if inside:
            self._most = torch.maximum(self._most, self._rows[document][:, inside].amax(1))


def both(one: Look, other: Look, scale: float) -> Look:
    """Two looks at the same document as one: of each span the larger figure, and the rows of both. All of `other`
    counts `scale` times. Of a span that is among the places of one only, the rows of the other are taken as 0."""
    places = torch.cat((one.places, other.places)).unique()
    rows = torch.cat((_spread(one, places), _spread(other, places) * scale))
    return Look(torch.maximum(one.figures, other.figures * scale), places, rows)


def _spread(look: Look, places: Tensor) -> Tensor:
    rows = torch.zeros(len(look.rows), len(places))
    rows[:, torch.searchsorted(places, look.places)] = look.rows
    return rows
