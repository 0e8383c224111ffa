"""The workers as an API process sees them, and which of them a request goes to."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from service.engine.fleet.records import WorkerState
from service.engine.messages import DocumentRef, EngineInfo, EngineStats

PLACES_FOR_ONE_MORE = 4
"""A worker that has the document is preferred while fewer than one question waits there for each so many places: one of
them is free soon. Copies made for every short wait take the memory of other documents, and are waited for as long."""


@dataclass(frozen=True, slots=True)
class Worker:
    """`followed`: requests that this process follows now. `others`: those that others had there when the worker last
    said what it had."""

    state: WorkerState
    documents: frozenset[DocumentRef] = frozenset()
    followed: int = 0
    others: int = 0

    @classmethod
    def of(cls, state: WorkerState, most_followed: int = 0) -> "Worker":
        """`most_followed`: how many this process followed at once, at most, since the state before."""
        documents = frozenset(state.stats.documents if state.stats is not None else ())
        return cls(state, documents, others=max(state.active - most_followed, 0))

    @property
    def id(self) -> str:
        return self.state.worker_id

    @property
    def life(self) -> tuple[str, str]:
        return self.state.worker_id, self.state.epoch

    @property
    def load(self) -> int:
        """What this process follows is known now. To add it to what the worker said a while ago would count answers
        that are over since, and send questions away from workers that have places."""
        return self.others + self.followed

    @property
    def has_room(self) -> bool:
        return self.load < self.state.info.max_batch

    @property
    def is_crowded(self) -> bool:
        """Whether a question would wait longer there than a document usually takes to come to another worker."""
        places = self.state.info.max_batch
        return self.load >= places + places // PLACES_FOR_ONE_MORE

    def has(self, document: DocumentRef) -> bool:
        """Whether a document, or a part of it, is in its memory."""
        return document in self.documents


class Roster:
    """Workers that live, by id. Of those that understand this process's tokens (`understands`) those of the fingerprint
    that most have are `serving`; the rest is left alone."""

    def __init__(self, understands: Callable[[EngineInfo], bool] = lambda info: True) -> None:
        self.understands = understands
        self._workers: dict[str, Worker] = {}
        self.fingerprint = ""
        self.info: EngineInfo | None = None
        self.seen_at = time.monotonic()
        self._followed: Counter[tuple[str, str]] = Counter()
        self._most_followed: Counter[tuple[str, str]] = Counter()

    @property
    def all(self) -> list[Worker]:
        return list(self._workers.values())

    @property
    def serving(self) -> list[Worker]:
        """Those that take requests."""
        ours = [w for w in self._of_ours() if w.state.ready and not w.state.draining]
        return [replace(w, followed=self._followed[w.life]) for w in ours]

    def update(self, states: Iterable[WorkerState], at: float, served: str = "") -> bool:
        """What the workers said at a time of the monotonic clock, or after it; whether another fingerprint is served
        than before. `served`: the one that other processes serve, as far as is known."""
        most = self._most_followed
        self._workers = {each.worker_id: Worker.of(each, most[each.worker_id, each.epoch]) for each in states}
        self._most_followed = self._followed.copy()
        self.seen_at = at
        before, self.fingerprint = self.fingerprint, self._chosen(served)
        if (ours := self._of_ours()) and (merged := merged_info([w.state.info for w in ours])) is not None:
            self.info = merged
        return bool(before) and before != self.fingerprint

    def follow(self, life: tuple[str, str], n: int) -> None:
        """Count `n` more requests that this process follows in a worker's life."""
        self._followed[life] += n
        self._most_followed[life] = max(self._most_followed[life], self._followed[life])
        if self._followed[life] <= 0:
            del self._followed[life]

    def lives(self, worker_id: str, epoch: str) -> bool:
        worker = self._workers.get(worker_id)
        return worker is not None and worker.state.epoch == epoch

    def stats(self) -> EngineStats | None:
        """Figures of all workers that serve, added up."""
        known = [w.state.stats for w in self._of_ours() if w.state.stats is not None]
        if not known:
            return None
        names = [name for name in EngineStats.__struct_fields__ if name != "documents"]
        figures: dict[str, Any] = {name: sum(getattr(each, name) for each in known) for name in names}
        return EngineStats(**figures)

    def _of_ours(self) -> list[Worker]:
        return [w for w in self._workers.values() if w.state.info.fingerprint_digest == self.fingerprint]

    def _chosen(self, served: str) -> str:
        """The most common fingerprint; of several the one that all serve, so that two processes do not serve two; else
        the one served here before, else the first by name."""
        known = [worker.state.info for worker in self._workers.values() if self.understands(worker.state.info)]
        counts = Counter(info.fingerprint_digest for info in known)
        if not counts:
            return self.fingerprint
        most = max(counts.values())
        best = sorted(digest for digest, n in counts.items() if n == most)
        return next((digest for digest in (served, self.fingerprint) if digest in best), best[0])


@dataclass(frozen=True, slots=True)
class Wish:
    """What speaks for a worker: the session's last one (`session`), documents that it may have in memory, and ids of
    those that have the first document on their disk, the latest first (`homes`). `tried` have refused."""

    documents: list[DocumentRef]
    session: str = ""
    homes: tuple[str, ...] = ()
    tried: frozenset[str] = frozenset()


def place_answer(workers: list[Worker], wish: Wish) -> Worker | None:
    """The session's worker, else the least loaded of those that have the document in memory, else of those that have
    it on their disk, else of all. When those that have it are crowded and another one has room and can restore it, that
    one."""
    open_to = [w for w in workers if w.id not in wish.tried]
    near = [w for w in open_to if all(w.has(document) for document in wish.documents)]
    stored = [w for w in open_to if w.id in wish.homes]
    stuck = [w for w in open_to if w.id == wish.session and (w.state.shares or w in near or w in stored)]
    for group in (stuck, near, stored):
        if group:
            best = least_loaded(group)
            able = [w for w in open_to if w.has_room and (w.state.shares or w in stored or w in near)]
            return least_loaded(able) if best.is_crowded and able else best
    return least_loaded(open_to) if open_to else None


def place_build(workers: list[Worker], wish: Wish) -> Worker | None:
    """The worker that has made the document or begun to: its disk has the journal. Else the least loaded."""
    open_to = [w for w in workers if w.id not in wish.tried]
    by_id = {w.id: w for w in open_to}
    at_home = [by_id[home] for home in wish.homes if home in by_id]
    return at_home[0] if at_home else least_loaded(open_to) if open_to else None


def least_loaded(workers: list[Worker]) -> Worker:
    """By the share of its places that is taken; of equals the one with more free memory for documents."""
    return min(workers, key=lambda w: (w.load / max(w.state.info.max_batch, 1), _resident_nbytes(w), w.id))


def _resident_nbytes(worker: Worker) -> int:
    return worker.state.stats.resident_nbytes if worker.state.stats is not None else 0


def merged_info(infos: list[EngineInfo]) -> EngineInfo | None:
    """What all workers can do: the smallest of their bounds, and the places of all together."""
    if not infos:
        return None
    return msgspec.structs.replace(
        min(infos, key=lambda info: info.pid),
        max_context=min(info.max_context for info in infos),
        max_batch=sum(info.max_batch for info in infos),
        tail_tokens=_least(info.tail_tokens for info in infos),
        resident_tokens=_least(info.resident_tokens for info in infos),
        n_index_heads=min(info.n_index_heads for info in infos),
        has_slots=all(info.has_slots for info in infos),
    )


def _least(bounds: Iterable[int]) -> int:
    """0 is no bound."""
    return min((bound for bound in bounds if bound), default=0)
