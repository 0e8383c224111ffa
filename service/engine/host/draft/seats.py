"""Tails of the draft model: those of running answers, and of sessions whose next question goes on behind them.

Nothing of them is stored. What a tail holds is known token by token, so that whatever the next question has in common
with it stays, and the rest is read again by a small model."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from service.engine.messages import DocumentRef
from service.engine.protocol import Runner
from service.engine.scheduler.errors import SchedulerClosed
from service.engine.scheduler.loop import Scheduler


@dataclass(slots=True, eq=False)
class Seat:
    """A slot, and the tokens whose rows it holds behind the document that `ref` and `digest` name."""

    slot: int
    session_id: str
    ref: DocumentRef
    digest: str
    rows: list[int] = field(default_factory=list[int])
    is_dropped: bool = False
    """Its session or document was released while an answer had it."""


class Seats:
    """At most `n_slots` at once; those of idle sessions give way, least recently used first."""

    def __init__(self, scheduler: Scheduler, runner: Runner, n_slots: int) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._n_free = n_slots
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, Seat] = OrderedDict()
        self._taken: set[Seat] = set()

    def take(self, session_id: str, ref: DocumentRef, digest: str) -> Seat | None:
        """A slot, with what is left there of the session; None when there is none."""
        with self._lock:
            seat = self._idle.pop(session_id, None)
            if seat is None or (seat.ref, seat.digest) != (ref, digest):
                slot = self._any_slot(seat)
                if slot is None:
                    return None
                seat = Seat(slot, session_id, ref, digest)
            self._taken.add(seat)
            return seat

    def keep(self, seat: Seat) -> None:
        """Let it wait for the session's next question."""
        with self._lock:
            self._taken.discard(seat)
            if seat.is_dropped:
                self._free(seat)
                return
            if (other := self._idle.pop(seat.session_id, None)) is not None:
                self._free(other)
            self._idle[seat.session_id] = seat

    def free(self, seat: Seat) -> None:
        with self._lock:
            self._taken.discard(seat)
            self._free(seat)

    def drop_session(self, session_id: str) -> None:
        self._drop(lambda seat: seat.session_id == session_id)

    def drop_document(self, ref: DocumentRef) -> None:
        self._drop(lambda seat: seat.ref == ref)

    def _drop(self, is_meant: Callable[[Seat], bool]) -> None:
        with self._lock:
            for seat in filter(is_meant, list(self._idle.values())):
                self._free(self._idle.pop(seat.session_id))
            for seat in filter(is_meant, self._taken):
                seat.is_dropped = True

    def _any_slot(self, seat: Seat | None) -> int | None:
        """An empty one: `seat`'s, where that is of no use any more. What the runner raises costs no slot."""
        if seat is None and self._n_free > 0:
            slot = self._scheduler.run(self._runner.new_tail)
            self._n_free -= 1
            return slot
        if seat is None and self._idle:
            _, seat = self._idle.popitem(last=False)
        if seat is None:
            return None
        try:
            self._scheduler.run(self._runner.truncate_tail, seat.slot, 0)
        except BaseException:
            self._free(seat)
            raise
        return seat.slot

    def _free(self, seat: Seat) -> None:
        self._n_free += 1
        with suppress(SchedulerClosed):
            self._scheduler.run(self._runner.free_tail, seat.slot)
