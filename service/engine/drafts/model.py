"""The draft model on the engine's thread: the guesses of all answers of a step, one forward for each place.

A small model decodes greedily what the large one then checks in one step (Leviathan et al., 2023). Each forward has a
row of every answer that is still guessing. What an answer said since it was asked last comes in the first of them,
together with the token behind which the first guess stands."""

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import monotonic
from typing import Any

import numpy as np

from service.engine.drafts.follower import Follower, ModelRates
from service.engine.protocol import Best, Rows, Runner

log = logging.getLogger(__name__)

FEED_ROWS = 256
"""Tokens in one forward, of all answers together: so many of long sessions are read between two steps."""
LEAST_FED = 16
"""Rows that are fed in a step though others wait longer for them than they should: else some would never be."""
SMALL = 8
"""Rows of a sequence up to which a forward counts as one that guesses."""
_MEASURED = 15
_LEAST = 4
"""Measurements before they count: the first ones also compile and make memory."""
_FIRST_SHARE = 0.15
"""Of a step of the main model, a forward of the draft model takes this much, until it is measured."""
_FEED_SHARE = 0.1
"""Of such a forward, each further row takes this much, until it is measured."""


_UNLIKELY = 10.0
"""A logit so far below the largest says nothing about how sure the model is."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What must come of guessing, in tokens: of one more forward for this answer, and of one more row in the main
    model's step."""

    forward: float = 0.0
    row: float = 0.0


@dataclass(slots=True)
class DraftCounters:
    """Only grow. `prefilled_tokens`: of documents, and of what was said before an answer began to be followed."""

    steps: int = 0
    prefilled_tokens: int = 0
    document_prefill_tokens: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class _Asked:
    """One answer in a round of guessing: at most `most` more tokens."""

    follower: Follower
    most: int
    is_fed: bool = False
    """Whether all its tokens are in its tail behind the first forward: else there is nothing to guess from."""
    guesses: list[int] = field(default_factory=list[int])
    n_guessed: int = 0


def shares(wanted: Sequence[int], most: int) -> list[int]:
    """Of so many rows that each wants those that it has, of `most` in all: who wants few has them, and where there are
    too few for all, the others come later, not all of them never."""
    found, left = [0] * len(wanted), most
    for n_done, i in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        found[i] = min(wanted[i], max(left // (len(wanted) - n_done), LEAST_FED), left)
        left -= found[i]
    return found


class DraftModel:
    """Guesses by a runner whose thread calls it. What fails ends guessing for the answers of that forward only, unless
    the device is lost. `vocab_size`: of the main model, whose rows beyond the tokens that both have may be others."""

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        self.runner = runner
        self._vocab_size = min(vocab_size, runner.limits.vocab_size)
        self.rates = ModelRates()
        self.counters = DraftCounters()
        self._rounds: dict[int, deque[float]] = {}
        self._per_row: deque[float] = deque(maxlen=_MEASURED)

    def forward_s(self, n_sequences: int, main_s: float) -> float:
        """Seconds of a forward that guesses for so many answers, where a step of the main model takes `main_s`."""
        known = [(abs(n - n_sequences), n) for n, seconds in self._rounds.items() if len(seconds) >= _LEAST]
        return median(self._rounds[min(known)[1]]) if known else _FIRST_SHARE * main_s

    def feed_s(self, n_rows: int, forward_s: float) -> float:
        """Seconds more that `n_rows` further rows take in a forward of `forward_s`."""
        return n_rows * (median(self._per_row) if len(self._per_row) >= _LEAST else _FEED_SHARE * forward_s)

    def guess(
        self, wanted: Sequence[tuple[Follower, int]], prices: Prices, feed: Sequence[int] | None = None
    ) -> list[list[int]]:
        """At most so many guesses for each; fewer where the model is not sure of them, none where not all is read that
        was said. `feed`: how many tokens of each are read, together no more than `FEED_ROWS`. Raises what the runner
        raises when it is not usable any more."""
        asked = [_Asked(follower, follower.most(n)) for follower, n in wanted]
        if feed is None:
            feed = shares([one.follower.n_pending if one.most else 0 for one in asked], FEED_ROWS)
        batch = [
            (one, rows)
            for one, n_rows in zip(asked, feed, strict=True)
            if one.most and n_rows and (rows := self._first_rows(one, n_rows)) is not None
        ]
        while batch:
            batch = self._round(batch, prices)
        return [one.guesses for one in asked]

    def _first_rows(self, one: _Asked, n_rows: int) -> Rows | None:
        follower = one.follower
        try:
            if (n_kept := follower.cut()) is not None:
                self.runner.truncate_tail(follower.slot, n_kept)
        except Exception as error:
            self._failed([one], error)
            return None
        tokens = follower.pending(n_rows)
        if max(tokens) >= self._vocab_size:
            follower.end()  # it has no such token
            return None
        one.is_fed = len(tokens) == follower.n_pending
        if len(tokens) <= SMALL:  # a step that a runner may have captured, with all its logits
            return Rows(follower.slot, follower.document, tokens, only_best=True, how_sure=True)
        first = len(tokens) - one.is_fed
        return Rows(follower.slot, follower.document, tokens, logits_from=first, only_best=True, how_sure=True)

    def _round(self, batch: Sequence[tuple[_Asked, Rows]], prices: Prices) -> list[tuple[_Asked, Rows]]:
        """One forward; what goes on behind it."""
        started = monotonic()
        try:
            logits = self.runner.forward([rows for _, rows in batch])
        except Exception as error:
            self._failed([one for one, _ in batch], error)
            return []
        self._measure([len(rows.tokens) for _, rows in batch], monotonic() - started)
        self.counters.steps += 1
        going = []
        for (one, rows), of_one in zip(batch, logits, strict=True):
            self.counters.prefilled_tokens += one.follower.fed(rows.tokens)
            if one.is_fed and (token_id := self._next(one, of_one[-1], prices)) is not None:
                going.append((one, replace(rows, tokens=[token_id], logits_from=0)))
        return going

    def _next(self, one: _Asked, logits: Any, prices: Prices) -> int | None:
        """Take the likeliest token as the next guess; None where guessing ends with it."""
        token_id, sure = _likeliest(logits, self._vocab_size)
        if not math.isfinite(sure):
            self._failed([one], ValueError("the draft model's logits are not finite"))
            return None
        if token_id >= self._vocab_size:
            return None
        chance = one.follower.guessed(token_id, sure)
        one.n_guessed += 1
        if chance < prices.row:
            return None
        one.guesses.append(token_id)
        further = chance * one.follower.next_chance(one.n_guessed)
        return token_id if one.n_guessed < one.most and further >= prices.forward + prices.row else None

    def _measure(self, n_rows: Sequence[int], seconds: float) -> None:
        n, total = len(n_rows), sum(n_rows)
        if max(n_rows) <= SMALL:
            self._rounds.setdefault(n, deque(maxlen=_MEASURED)).append(seconds)
        elif n in self._rounds and total >= 2 * SMALL * n:
            self._per_row.append(max(seconds - median(self._rounds[n]), 0.0) / (total - n))

    def _failed(self, asked: Sequence[_Asked], error: Exception) -> None:
        """Answers go on without. Raises `error` when nothing can be computed any more."""
        for one in asked:
            one.follower.end()
            one.guesses.clear()
        if not self.runner.usable():
            raise error
        log.error("the draft model failed for %d answers, which go on without it", len(asked), exc_info=error)


def _likeliest(found: Any, vocab_size: int) -> tuple[int, float]:
    """The token of a row that is likeliest, and its probability; NaN where the logits are broken. Of float32 logits
    ``[vocab]`` among the first `vocab_size`, and by those that come into question, in a third of the time that it takes
    to look at all; of what a device found as it is."""
    if isinstance(found, Best):
        return found.token_id, found.sure if found.is_finite else math.nan
    values = found[:vocab_size].numpy()
    best = int(values.argmax())  # of a NaN, where there is one
    top = float(values[best])
    if not math.isfinite(top):
        return best, math.nan
    return best, float(1 / np.exp(values[values > top - _UNLIKELY] - top).sum())
