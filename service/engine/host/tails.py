"""Tails of sessions: each in a slot of the runner, kept there between turns while no other needs it."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from service.engine.messages import DocumentRef, TurnRef
from service.engine.protocol import Runner
from service.engine.scheduler.loop import Scheduler


@dataclass(slots=True, eq=False)
class Tail:
    """A slot, and the tokens of the finished turns whose KV it holds in stored form."""

    slot: int
    session_id: str
    document: DocumentRef
    token_digest: str
    chain: list[int] = field(default_factory=list)


class TailPool:
    """Slots of running answers and idle sessions. The caller sees to it that at most `n_slots` run at once;
    idle tails give way to them, least recently used first. One more slot, `spare`, is for probes."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, Tail] = OrderedDict()
        self.n_slots = runner.limits.n_slots - 1
        self.spare = scheduler.run(runner.new_tail)
        self._n_used = 0

    @property
    def n_used(self) -> int:
        """Slots that hold a tail, of a running answer or an idle session."""
        return self._n_used

    def take(self, session_id: str, document: DocumentRef, token_digest: str, turns: Sequence[TurnRef]) -> Tail:
        """A tail with as many of the session's turns as are still in a slot; `chain` says which tokens."""
        with self._lock:
            tail = self._idle.pop(session_id, None)
            if tail is not None and (tail.document, tail.token_digest) == (document, token_digest):
                n_common = _common_length(tail.chain, turns)
            else:
                tail, n_common = tail or self._any_slot(), 0
            self._scheduler.run(self._runner.truncate_tail, tail.slot, n_common)
            return Tail(tail.slot, session_id, document, token_digest, tail.chain[:n_common])

    def keep(self, tail: Tail) -> None:
        """Let an answer's tail wait in its slot for the session's next turn."""
        with self._lock:
            if other := self._idle.pop(tail.session_id, None):
                self._free(other)
            self._idle[tail.session_id] = tail

    def free(self, tail: Tail) -> None:
        with self._lock:
            self._free(tail)

    def drop_session(self, session_id: str) -> None:
        with self._lock:
            if tail := self._idle.pop(session_id, None):
                self._free(tail)

    def drop_document(self, document: DocumentRef) -> None:
        with self._lock:
            for session_id in [s for s, tail in self._idle.items() if tail.document == document]:
                self._free(self._idle.pop(session_id))

    def _any_slot(self) -> Tail:
        if self._n_used < self.n_slots:
            self._n_used += 1
            return Tail(self._scheduler.run(self._runner.new_tail), "", DocumentRef("", ""), "")
        return self._idle.popitem(last=False)[1]

    def _free(self, tail: Tail) -> None:
        self._n_used -= 1
        self._scheduler.run(self._runner.free_tail, tail.slot)


def _common_length(chain: list[int], turns: Sequence[TurnRef]) -> int:
    """Tokens of the longest run of whole turns that `chain` begins with."""
    n = 0
    for turn in turns:
        if chain[n : n + len(turn.token_ids)] != turn.token_ids:
            break
        n += len(turn.token_ids)
    return n
