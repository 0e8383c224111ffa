"""Whether the draft model guesses in a step, for which answers and how far: where that is faster than anything else.

A guess of it costs a forward of its own, in the time of which the main model does nothing. So what is looked up comes
first, and the draft model is asked where its guesses, at that price, give more tokens a second.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.engine.drafts.drafter import Drafter
from service.engine.drafts.follower import Follower
from service.engine.drafts.model import FEED_ROWS, LEAST_FED, SMALL, DraftModel, Prices, shares
from service.engine.drafts.planner import MOST_SLOWER

if TYPE_CHECKING:
    from service.engine.drafts.planner import DraftPlanner

LEAST_GAIN = 1.03
"""Tokens a second with the draft model, as a multiple of those without it, from which on it is asked."""
_CAUGHT_UP_IN = 64
"""Steps over which it counts what an answer's tokens so far cost to be read by it."""
_PROBE_SHARE = 0.02
"""Of the time of steps: where it did not pay it is asked again now and then, for so much, of all answers together."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """`counts`: drafts of each sequence, those of `followers` by the draft model, but for those `behind`. `feed`: how
    many of their tokens it reads."""

    speed: float
    counts: list[int]
    followers: list[Follower | None]
    forward: float
    """A forward of the draft model, as a multiple of a step."""
    feed: list[int]
    behind: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Step:
    """What there is to guess in a step. `room`: how many drafts each sequence may have; `looked_up`: the chances of
    those that are looked up."""

    planner: "DraftPlanner"
    followers: Sequence[Follower | None]
    room: Sequence[int]
    looked_up: Sequence[Sequence[float]]


class Leader:
    """Of one engine."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self._spared_s = 0.0
        """What steps since the last probe left for one."""

    def plan(
        self,
        planner: "DraftPlanner",
        drafters: Sequence[Drafter | None],
        room: Sequence[int],
        looked_up: Sequence[Sequence[float]],
    ) -> list[list[int]] | None:
        """The drafts of each sequence; None where those that are looked up, with these chances, are all. Raises what
        the draft model's runner raises when it is lost."""
        for drafter in drafters:
            if drafter is not None:
                drafter.is_led = False
        followers = [None if drafter is None else drafter.follower for drafter in drafters]
        if not any(follower is not None and follower.most(n) for follower, n in zip(followers, room, strict=True)):
            return None
        if not planner.costs.has_base(len(drafters)):
            return [[] for _ in drafters]  # what a step takes without any is measured first
        found = self._best(_Step(planner, followers, room, looked_up))
        if found is None:
            return None
        return self._drafts(planner, found, drafters)

    def _best(self, step: _Step) -> _Plan | None:
        planner = step.planner
        speed, counts = planner.fastest(step.looked_up)
        base_s, n = planner.costs.base_s, len(step.followers)
        plain = max(speed, float(n))
        least = LEAST_GAIN * plain
        asked, chances = self._asked(step)
        best: _Plan | None = None
        if n_asked := sum(follower is not None for follower in asked):
            forward_s = self.model.forward_s(n_asked, base_s)
            feed = sum(self._feed_s(one, forward_s) for one in asked if one is not None) / _CAUGHT_UP_IN / base_s
            for speed, counts in self._plans(planner, asked, chances, feed, forward_s / base_s):
                if speed >= (least if best is None else best.speed):
                    best = _plan(speed, counts, asked, forward_s / base_s)
            if best is not None:
                return self._fed(step, best, forward_s)
        return self._probe(step, plain)

    def _fed(self, step: _Step, plan: _Plan, forward_s: float) -> _Plan:
        """This plan where what is to be read for it can be in this step; else a step that reads some of it. There who
        is behind has what is looked up, and the others one guess: they have the forward as well."""
        planner, n = step.planner, len(step.followers)
        wanted = [i for i, n_rows in enumerate(plan.feed) if n_rows]
        behind = [i for i in wanted if plan.feed[i] > min(SMALL, FEED_ROWS // len(wanted))]
        others = [plan.feed[i] for i in wanted if i not in behind]
        depth = max(plan.counts[i] for i in wanted)
        cost = planner.costs.ratio(n, n + sum(plan.counts)) + depth * plan.forward
        if sum(plan.feed[i] for i in behind) <= self._feed_rows(step, cost, forward_s, others):
            return plan
        followers, chances = list(plan.followers), list(step.looked_up)
        for i, one in enumerate(followers):
            if one is None or i in behind:
                continue
            if plan.feed[i] and sum(guess := one.chances(1)) > sum(chances[i]):
                chances[i] = guess
            else:
                followers[i] = None
        speed, counts = _beside(planner, chances, plan.forward)
        feed = [
            n_rows if followers[i] is not None and counts[i] and i not in behind else 0
            for i, n_rows in enumerate(plan.feed)
        ]
        cost = planner.costs.ratio(n, n + sum(counts)) + plan.forward
        most = self._feed_rows(step, cost, forward_s, [n_rows for n_rows in feed if n_rows])
        for i, n_rows in zip(behind, shares([plan.feed[i] for i in behind], most), strict=True):
            feed[i] = n_rows
        return _Plan(speed, counts, followers, plan.forward, feed, behind)

    def _feed_rows(self, step: _Step, cost: float, forward_s: float, others: Sequence[int]) -> int:
        """How many rows may be fed beside those of `others` in a step that takes `cost` without any of them."""
        n_others = sum(others)
        further = n_others - len(others)  # one row of each is in the forward
        return min(max(self._can_wait_for(step, cost, forward_s) - further, LEAST_FED), FEED_ROWS - n_others)

    def _can_wait_for(self, step: _Step, cost: float, forward_s: float) -> int:
        """How many rows others can wait for, where a step takes `cost` without them."""
        per_row = self.model.feed_s(1, forward_s) / step.planner.costs.base_s
        if len(step.followers) == 1 or per_row <= 0:
            return FEED_ROWS
        return min(int((MOST_SLOWER - cost) / per_row), FEED_ROWS)

    def _plans(
        self,
        planner: "DraftPlanner",
        asked: Sequence[Follower | None],
        chances: Sequence[Sequence[float]],
        feed: float,
        forward: float,
    ) -> Iterator[tuple[float, list[int]]]:
        """The fastest step for each number of forwards of the draft model, and its drafts; for one sequence that of all
        numbers, since each of its drafts is a forward."""
        if len(asked) == 1:
            yield planner.fastest(chances, feed, forward)
            return
        for depth in range(1, max(map(len, chances)) + 1):
            cut = [
                of_one if follower is None else of_one[:depth] for of_one, follower in zip(chances, asked, strict=True)
            ]
            yield planner.fastest(cut, feed + depth * forward)

    def _asked(self, step: _Step) -> tuple[list[Follower | None], list[Sequence[float]]]:
        """Of each sequence what would be asked, where that is likelier to be right than what is looked up, and the
        chances of its drafts."""
        asked: list[Follower | None] = []
        chances: list[Sequence[float]] = []
        for follower, n, of_lookup in zip(step.followers, step.room, step.looked_up, strict=True):
            guessed = [] if follower is None else follower.chances(min(step.planner.most, n))
            is_better = sum(guessed) > sum(of_lookup)
            asked.append(follower if is_better else None)
            chances.append(guessed if is_better else of_lookup)
        return asked, chances

    def _feed_s(self, follower: Follower, forward_s: float) -> float:
        return self.model.feed_s(follower.n_pending - 1, forward_s)

    def _probe(self, step: _Step, plain: float) -> _Plan | None:
        """One guess of an answer for which the draft model was not asked for long: others come, for which it is right.
        Of several that one which waits longest. `plain`: tokens in the time of a step without it."""
        waiting = [
            (i, follower)
            for i, follower in enumerate(step.followers)
            if follower is not None and not step.looked_up[i] and follower.most(min(step.room[i], 1))
        ]
        if not waiting:
            return None
        base_s = step.planner.costs.base_s
        self._spared_s += base_s * _PROBE_SHARE
        for _, follower in waiting:
            follower.n_passed += 1
        rested = [(i, follower) for i, follower in waiting if follower.n_passed >= follower.rest]
        for i, follower in sorted(rested, key=lambda one: -one[1].n_passed):
            if (found := self._probe_of(step, i, follower, plain)) is not None:
                plan, price = found
                if price * base_s > self._spared_s:
                    return None
                self._spared_s = 0.0
                return plan
        return None

    def _probe_of(self, step: _Step, i: int, follower: Follower, plain: float) -> tuple[_Plan, float] | None:
        """A guess of this answer beside what is looked up for others, or some of what must be read before, and what of
        a step is lost by it; None where the step has no row for it, or others would wait too long."""
        planner, n, n_rows = step.planner, len(step.followers), follower.n_pending
        base_s = planner.costs.base_s
        forward_s = self.model.forward_s(1, base_s)
        # as if it were sure, so that it is the first to have a row
        chances = [[1.0] if j == i else of_one for j, of_one in enumerate(step.looked_up)]
        if not planner.fastest(chances, forward_s / base_s)[1][i]:
            return None
        room = self._can_wait_for(step, planner.costs.ratio(n, n + 1) + forward_s / base_s, forward_s)
        feed = min(n_rows, room + 1, FEED_ROWS)  # the row of its last token is in the forward
        if feed < min(n_rows, LEAST_FED):
            return None
        more = (forward_s + self.model.feed_s(feed - 1, forward_s)) / base_s
        _, counts = planner.fastest(chances, more) if feed == n_rows else _beside(planner, step.looked_up, more)
        feeds = [feed if j == i else 0 for j in range(n)]
        tokens = n + sum(sum(of_one[:count]) for of_one, count in zip(step.looked_up, counts, strict=True))
        price = planner.costs.ratio(n, n + sum(counts)) + more - tokens / plain
        asked = [one if j == i else None for j, one in enumerate(step.followers)]
        return _Plan(0.0, counts, asked, 0.0, feeds, () if feed == n_rows else (i,)), price

    def _drafts(self, planner: "DraftPlanner", found: _Plan, drafters: Sequence[Drafter | None]) -> list[list[int]]:
        n = len(drafters)
        asked = [i for i, n_rows in enumerate(found.feed) if n_rows]
        n_led = len(asked) - sum(i in found.behind for i in asked)
        per_row = max(planner.costs.ratio(n, n + 1) - 1, 0.0)
        forward = found.forward / max(n_led, 1)
        wanted = [
            (follower, 1 if i in found.behind else found.counts[i])
            for i in asked
            if (follower := found.followers[i]) is not None
        ]
        prices = Prices(forward * found.speed, per_row * found.speed)
        guessed = dict(zip(asked, self.model.guess(wanted, prices, [found.feed[i] for i in asked]), strict=True))
        drafts: list[list[int]] = []
        for i, (drafter, n_drafts) in enumerate(zip(drafters, found.counts, strict=True)):
            if drafter is None or not n_drafts:
                drafts.append([])
            elif i in guessed and i not in found.behind:
                drafts.append(guessed[i])
                drafter.is_led = True
            else:
                drafts.append(drafter.draft(n_drafts))
        return drafts


def _plan(speed: float, counts: list[int], followers: list[Follower | None], forward: float) -> _Plan:
    """Where all is read that the drafts of `followers` need."""
    feed = [one.n_pending if one is not None and count else 0 for one, count in zip(followers, counts, strict=True)]
    return _Plan(speed, counts, followers, forward, feed)


def _beside(planner: "DraftPlanner", chances: Sequence[Sequence[float]], more: float) -> tuple[float, list[int]]:
    """The drafts of each sequence in a step that takes `more` in any case, none where they do not pay."""
    speed, counts = planner.fastest(chances, more)
    n = len(chances)
    without = n / (1 + more)
    return (speed, counts) if speed >= LEAST_GAIN * without else (without, [0] * n)
