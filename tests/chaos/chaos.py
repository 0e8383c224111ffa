"""Rounds of faults in one world, and what came of them."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random

from tests.chaos.asking import Known, Seen, Violation
from tests.chaos.cases import Case
from tests.chaos.visitor import Visitor
from tests.chaos.world import World

MOST_VISIT_S = 6.0
"""A visit that had to wait for a fault to end says nothing about how long one takes."""
MOST_DOCUMENTS = 8
"""Then the oldest is deleted, while the next fault happens."""


@dataclass(slots=True)
class Tally:
    """What came of the rounds of a case. `n_read_again`: documents that were computed once more."""

    n_rounds: int = 0
    n_read_again: int = 0
    seconds: float = 0.0
    seen: Seen = field(default_factory=Seen)
    failure: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, other: "Tally") -> None:
        self.n_rounds += other.n_rounds
        self.n_read_again += other.n_read_again
        self.seconds += other.seconds
        self.seen.add(other.seen)
        self.failure = self.failure or other.failure


@dataclass(slots=True)
class Chaos:
    """Rounds in one world, whose documents stay for a while."""

    world: World
    random: Random
    documents: list[Known] = field(default_factory=list)
    visit_s: float = 3.0
    """How long a visit took lately: a fault happens at a random moment of it."""

    def round(self, case: Case, tally: Tally) -> None:
        """One visitor uploads, asks and deletes, another one asks about what is there, while a fault happens; then one
        asks about something. Raises Violation."""
        first, second, third = (self._visitor(case) for _ in range(3))
        fresh, oldest, older = first.new(), self._oldest(), self._any()
        before = Counter(self.world.n_read())
        began = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            visits = [pool.submit(_visit, first, fresh, oldest)]
            if older is not None:
                visits.append(pool.submit(_ask, second, older))
            time.sleep(self.random.uniform(0, self.visit_s))
            case.fault(self.world, self.random)
            self.documents.append(visits[0].result())
            for visit in visits:
                visit.result()
        self.visit_s = min(time.monotonic() - began, MOST_VISIT_S)
        self.world.until_whole()
        third.ask(self.random.choice(self.documents))
        for visitor in (first, second, third):
            tally.seen.add(visitor.seen)
        again = self._read_again(before)
        tally.n_rounds, tally.n_read_again = tally.n_rounds + 1, tally.n_read_again + len(again)
        if again and not case.again:
            raise Violation(f"documents were computed again though a copy was there: {again}")

    def storm(self, cases: Sequence[Case]) -> Seen:
        """All that happens in these cases, one after the other, while a visitor uploads and asks; what was seen. Raises
        Violation."""
        visitor = Visitor(self.world, self.random.getrandbits(32), disk_full=any(case.full for case in cases))
        fresh, over = visitor.new(), threading.Event()
        with ThreadPoolExecutor(1) as pool:
            visit = pool.submit(_visit_until, visitor, fresh, over)
            try:
                for case in cases:
                    time.sleep(self.random.uniform(0, 0.5))
                    case.fault(self.world, self.random)
            finally:
                over.set()
            self.documents.append(visit.result())
        self.world.until_whole()
        self.ask_again(1)
        return visitor.seen

    def ask_again(self, most: int = MOST_DOCUMENTS) -> None:
        """What was read is still there, and answers. Raises Violation."""
        visitor = Visitor(self.world, self.random.getrandbits(32))
        for known in self.random.sample(self.documents, min(most, len(self.documents))):
            visitor.ask(known)

    def _visitor(self, case: Case) -> Visitor:
        return Visitor(self.world, self.random.getrandbits(32), disk_full=case.full)

    def _any(self) -> Known | None:
        return self.random.choice(self.documents) if self.documents else None

    def _oldest(self) -> Known | None:
        """One that only its visitor knows from now on."""
        return self.documents.pop(0) if len(self.documents) > MOST_DOCUMENTS else None

    def _read_again(self, before: Counter[str]) -> list[str]:
        now = self.world.n_read()
        return [document for document, n in now.items() if n > max(before[document], 1)]


def _visit(visitor: Visitor, fresh: Known, oldest: Known | None) -> Known:
    read = visitor.read(fresh)
    visitor.ask(read)
    if oldest is not None:
        visitor.delete(oldest)
    return read


def _visit_until(visitor: Visitor, fresh: Known, over: threading.Event) -> Known:
    read = visitor.read(fresh)
    visitor.ask(read)
    while not over.wait(1.0):
        visitor.ask(read)
    return read


def _ask(visitor: Visitor, known: Known) -> Known:
    visitor.ask(known)
    return known
