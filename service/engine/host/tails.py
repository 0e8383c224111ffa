"""Tails of sessions: each in a slot of the runner, kept there between turns while no other needs it."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from service.engine.host.kept import holds
from service.engine.messages import DocumentRef, SpanRef, TurnRef
from service.engine.protocol import Runner
from service.engine.scheduler.loop import Scheduler

_OTHER_DOCUMENT = 1 << 30


@dataclass(frozen=True, slots=True)
class HeldTurn:
    """The tokens of a finished turn, and what was fetched while their KV was computed."""

    token_ids: list[int]
    spans: list[SpanRef]


@dataclass(slots=True, eq=False)
class Tail:
    """A slot, and the finished turns whose KV it holds in stored form. `token_digest` names the document's rows."""

    slot: int
    session_id: str
    document: DocumentRef
    token_digest: str
    turns: list[HeldTurn] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        """Tokens of these turns."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def chain(self) -> list[int]:
        """What names these turns: of each what was fetched for it, and its tokens."""
        return [part for turn in self.turns for part in turn_chain(turn.token_ids, turn.spans)]


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
        """A tail with as many of the session's turns as are still in a slot."""
        with self._lock:
            tail = self._idle.pop(session_id, None)
            if tail is not None and (tail.document, tail.token_digest) == (document, token_digest):
                common = _common(tail.turns, turns)
            else:
                tail, common = tail or self._any_slot(), []
            kept = Tail(tail.slot, session_id, document, token_digest, common)
            try:
                self._scheduler.run(self._runner.truncate_tail, tail.slot, kept.n_tokens)
            except BaseException:
                self._free(tail)
                raise
            return kept

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
            for session_id in [s for s, tail in self._idle.items() if holds(tail.document, document)]:
                self._free(self._idle.pop(session_id))

    def _any_slot(self) -> Tail:
        if self._n_used < self.n_slots:
            tail = Tail(self._scheduler.run(self._runner.new_tail), "", DocumentRef("", ""), "")
            self._n_used += 1
            return tail
        return self._idle.popitem(last=False)[1]

    def _free(self, tail: Tail) -> None:
        self._n_used -= 1
        self._scheduler.run(self._runner.free_tail, tail.slot)


def turn_chain(token_ids: Sequence[int], spans: Sequence[SpanRef]) -> list[int]:
    """A turn as part of a chain. Token ids are not negative, so that spans cannot be taken for them; nor has a document
    so many tokens that its length could be taken for the number of another one."""
    return [*[-1 - number for span in spans for number in _numbers(span)], *token_ids]


def _numbers(span: SpanRef) -> tuple[int, ...]:
    of_document = (_OTHER_DOCUMENT + span.document,) if span.document else ()
    return *of_document, span.first, span.n_tokens


def _common(held: list[HeldTurn], turns: Sequence[TurnRef]) -> list[HeldTurn]:
    """The longest run of turns that both begin with."""
    wanted = [(turn.token_ids, turn.spans) for turn in turns]
    n = 0
    while n < min(len(held), len(wanted)) and (held[n].token_ids, held[n].spans) == wanted[n]:
        n += 1
    return held[:n]
