"""The guesses of one answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.engine.drafts.lookup import COMPARED, SHORTEST, DocumentLookup, History, Source
from service.engine.drafts.rates import Rates

if TYPE_CHECKING:
    from service.engine.drafts.follower import Follower


@dataclass(slots=True)
class _Cursor:
    """Where the next token is guessed to stand in `source`, and how many before it agree."""

    source: Source
    place: int
    length: int


class Drafter:
    """Follows an answer token by token, and guesses how it goes on.

    While guesses are right they go on where they are; after a wrong one the place is looked for anew, in every source,
    by tokens of the answer alone: what a prompt ends with is the same in every turn, and says nothing. The place where
    most tokens agree is taken, of a document before that of the session.
    """

    def __init__(
        self,
        documents: Sequence[Source],
        said: Sequence[int],
        rates: Rates,
        follow: "Callable[[], Follower | None] | None" = None,
    ) -> None:
        """`said`: the session's tokens so far, those of the question among them. `follow` gives what follows the answer
        in the draft model, once its document is there."""
        self._said = said if follow is not None else ()
        self._follow = follow
        self._follower: Follower | None = None
        self.is_led = False
        """Whether the last drafts were the draft model's."""
        self._history = History()
        self._sources: list[Source] = [*documents, *([DocumentLookup(said)] if said else []), self._history]
        self._rates = Rates(rates)
        self._cursor: _Cursor | None = None
        self._last: dict[int, int] = {}
        self._n_answered = 0

    @property
    def follower(self) -> "Follower | None":
        """What follows the answer in the draft model; None where nothing does, not yet or no longer."""
        if self._follow is None:
            return None
        if self._follower is None and (found := self._follow()) is not None:
            found.begin([*self._said, *self._history.last(len(self._history))])
            self._follower = found
        return self._follower if self._follower is not None and self._follower.alive else None

    def chances(self, most: int) -> list[float]:
        """For each of at most `most` guessed tokens the chance that it is right, and all before it."""
        cursor, chance, found = self._cursor, 1.0, []
        if cursor is None or most < 1:
            return []
        for i in range(len(cursor.source.take(cursor.place, most))):
            chance *= self._rates.chance(cursor.length + i)
            found.append(chance)
        return found

    def draft(self, n_tokens: int) -> list[int]:
        """The next `n_tokens` as they are guessed; fewer where the source ends."""
        return [] if self._cursor is None else self._cursor.source.take(self._cursor.place, n_tokens)

    def end(self) -> None:
        """The draft model follows the answer no more."""
        if self._follower is not None:
            self._follower.end()

    def push(self, token_id: int) -> None:
        """The answer goes on with this token."""
        self._history.push(token_id)
        self._n_answered += 1
        if self._follower is not None:
            self._follower.push(token_id)
        cursor = self._cursor
        if cursor is not None and self._goes_on(cursor, token_id):
            return
        self._cursor = self._found()

    def _goes_on(self, cursor: _Cursor, token_id: int) -> bool:
        is_right = cursor.source.take(cursor.place, 1) == [token_id]
        self._rates.count(cursor.length, is_right=is_right)
        if is_right:
            cursor.place, cursor.length = cursor.place + 1, cursor.length + 1
            return bool(cursor.source.take(cursor.place, 1))
        self._last[self._sources.index(cursor.source)] = cursor.place
        return False

    def _found(self) -> _Cursor | None:
        if self._n_answered < SHORTEST:
            return None
        context, best = self._history.last(min(COMPARED, self._n_answered)), None
        for i, source in enumerate(self._sources):
            found = source.find(context, self._last.get(i))
            if found is not None and (best is None or found[1] > best.length):
                best = _Cursor(source, *found)
        return best
