"""An answer as the draft model follows it: which of its tokens are in that model's tail, and what it guessed."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from service.engine.drafts.rates import Kinds, Rates

_PLACES = Kinds((1, 2, 3, 4, 5, 6), (0.7,) * 7)
"""By how many guesses stand before it in the same step: what is known before anything was computed."""
_SURE = Kinds((0.2, 0.4, 0.6, 0.8, 0.9, 0.97), (0.15, 0.3, 0.5, 0.65, 0.8, 0.9, 0.97))
"""By the probability that the draft model itself gives it."""


_RESTS = 8, 64
"""Steps after which an answer for which it was wrong may be asked about again: at first, and at most."""


class ModelRates:
    """How often the draft model is right; an answer's own begin as those of the process."""

    def __init__(self, parent: "ModelRates | None" = None) -> None:
        self.places = Rates(parent.places if parent is not None else None, _PLACES)
        self.sure = Rates(parent.sure if parent is not None else None, _SURE)


class Follower:
    """`slot` is a tail of the draft model's runner, which holds `rows` behind `document`, one token each: those of the
    answer's context that both agree on first, then guesses, right or wrong. At most `room` rows fit.

    The engine's thread is its only user, but for `end`, which is for any.
    """

    def __init__(self, slot: int, document: Any, rates: ModelRates, room: int, rows: Sequence[int] = ()) -> None:
        self.slot = slot
        self.document = document
        self.rows = list(rows)
        self.alive = True
        self.n_passed = 0
        """Steps since it last guessed, where nothing was looked up either."""
        self.rest = _RESTS[0]
        """Steps for which it is better left alone where asking does not seem to pay: twice as many after each wrong
        guess."""
        self._rates = ModelRates(rates)
        self._room = room
        self._tokens: list[int] = []
        self._n_agreed = 0
        self._n_said = 0
        self._open: deque[tuple[int, float]] = deque()
        self._place = 0
        self._chance = 1.0

    def begin(self, tokens: Sequence[int]) -> None:
        """`tokens` stand behind the document: what was said, and the answer so far."""
        self._tokens, self._n_said = list(tokens), len(tokens)
        pairs = zip(self.rows, tokens, strict=False)
        self._n_agreed = next(
            (i for i, (one, other) in enumerate(pairs) if one != other), min(len(self.rows), len(tokens))
        )

    def end(self) -> None:
        """Guess no more for this answer."""
        self.alive = False

    def push(self, token_id: int) -> None:
        """The answer goes on with this token."""
        in_rows = self._n_agreed == len(self._tokens) < len(self.rows)
        if in_rows and self.rows[self._n_agreed] == token_id:
            self._n_agreed += 1
        self._tokens.append(token_id)
        if self._open:
            self._compare(*self._open.popleft(), token_id)

    def _compare(self, guess: int, sure: float, token_id: int) -> None:
        self._rates.places.count(self._place, is_right=guess == token_id)
        self._rates.sure.count(sure, is_right=guess == token_id)
        self.rest = _RESTS[0] if guess == token_id else min(2 * self.rest, _RESTS[1])
        self._place += 1
        if guess != token_id:
            self._open.clear()

    @property
    def n_kept(self) -> int:
        """Of its rows those that stay when it is asked again: the last token's logits are always computed anew."""
        return min(self._n_agreed, len(self._tokens) - 1)

    @property
    def n_pending(self) -> int:
        """Tokens that it must be fed before it can guess."""
        return len(self._tokens) - self.n_kept

    def pending(self, most: int) -> list[int]:
        """The first of these tokens, at most so many."""
        return self._tokens[self.n_kept : self.n_kept + most]

    def most(self, n_tokens: int) -> int:
        """How many guesses of so many its tail has room for."""
        return max(min(n_tokens, self._room - len(self._tokens)), 0)

    def chances(self, most: int) -> list[float]:
        """For each of at most `most` guesses the chance that it is right, and all before it."""
        chance, found = 1.0, []
        for place in range(self.most(most)):
            chance *= self._rates.places.chance(place)
            found.append(chance)
        return found

    def next_chance(self, place: int) -> float:
        """That the guess at this place is right when all before it are."""
        return self._rates.places.chance(place)

    def cut(self) -> int | None:
        """Forget rows that are not the answer's; how many stay, None where all do."""
        n_kept = self.n_kept
        self._open.clear()
        self._place, self._chance = 0, 1.0
        if n_kept == len(self.rows):
            return None
        del self.rows[n_kept:]
        self._n_agreed = n_kept
        return n_kept

    def fed(self, tokens: Sequence[int]) -> int:
        """Its tail has these rows now: tokens of the answer or guesses. How many of them were there before the answer
        was followed."""
        first = len(self.rows)
        self.rows += tokens
        if first == self._n_agreed:
            self._n_agreed = min(len(self.rows), len(self._tokens))
        return max(min(len(self.rows), self._n_said) - first, 0)

    def guessed(self, token_id: int, sure: float) -> float:
        """It guesses this token next, with this probability of its own; the chance that it is right, and all before it
        in this step."""
        self.n_passed = 0
        self._open.append((token_id, sure))
        self._chance *= self._rates.sure.chance(sure)
        return self._chance
