"""Documents on the device: one copy of each however many answers use it, least recently used out first."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from service.engine.drafts.lookup import DocumentLookup
from service.engine.messages import DocumentRef, ReleaseDone
from service.engine.protocol import Runner
from service.engine.scheduler.cancel import Cancelled, CancelToken, Reason
from service.engine.scheduler.errors import SchedulerClosed
from service.engine.scheduler.loop import Scheduler

log = logging.getLogger(__name__)

RELEASE_WAIT_S = 10.0

Size = tuple[int, int]
"""Rows and slots of a document, as the runner counts them."""


class DocumentTooLarge(Exception):
    """The document alone needs more memory than there is for documents."""


class NoRoom(Exception):
    """Documents that are in use take the memory, and the caller does not wait for it."""


@dataclass(slots=True, eq=False)
class ResidentDocument:
    """`handle` is the runner's. `token_digest` names its `n_tokens` rows, which need not be all of the document's, and
    its `n_slot_rows` slots, those of all heads of all layers together.
    `next_position`, `last_position`: of its rows, None for consecutive tokens. `verified`: its canary agreed, or it was
    computed here. `slot_places`: the tokens that are slots, of each watched head. `source`: the tier it was loaded
    from. A `pinned` one leaves only when no other can. `lookup`: where its tokens are found again, in host memory."""

    ref: DocumentRef
    token_digest: str
    n_tokens: int
    n_slot_rows: int
    nbytes: int
    handle: Any = None
    last_token: int = -1
    next_position: int | None = None
    last_position: int | None = None
    canary: Any = None
    lookup: DocumentLookup | None = None
    slot_places: Sequence[npt.NDArray[np.int64]] = ()
    verified: bool = False
    source: str = "none"
    pinned: bool = False
    loading: bool = True
    leaving: bool = False
    dropped: bool = False
    error: BaseException | None = None
    users: list[CancelToken] = field(default_factory=list)
    last_used_s: float = 0.0


class Residency:
    """Who uses which document. `budget_nbytes` bounds all documents together, those in use included.

    A document is loaded by the first who asks; others wait for it and share its error, if it fails. `move_out` is
    called, without the lock, with a complete document that nobody uses before it leaves the device for another.
    Lock order: this lock, then the scheduler's.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        budget_nbytes: int,
        move_out: Callable[[ResidentDocument, DocumentRef], object] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._budget = budget_nbytes
        self._move_out = move_out
        self._changed = threading.Condition()
        self._entries: dict[DocumentRef, ResidentDocument] = {}
        self._nbytes = 0
        self._n_held = 0
        self._most = runner.limits.n_documents or sys.maxsize

    @property
    def n_documents(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def lookups(self) -> list[DocumentLookup]:
        """Where documents' tokens are found again, in host memory."""
        with self._changed:
            return [entry.lookup for entry in self._entries.values() if entry.lookup is not None]

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest document that fits the budget, in whole blocks."""
        block = self._runner.layout.block_tokens
        return self._budget // self._runner.document_nbytes(block) * block

    @property
    def n_references(self) -> int:
        with self._changed:
            return sum(len(entry.users) for entry in self._entries.values())

    @property
    def refs(self) -> list[DocumentRef]:
        """What is there, or on its way."""
        with self._changed:
            return list(self._entries)

    @contextmanager
    def held(
        self,
        ref: DocumentRef,
        token_digest: str,
        n_tokens: int,
        load: Callable[[ResidentDocument], None],
        cancel: CancelToken,
        *,
        n_slot_rows: int = 0,
        fresh: bool = False,
        pinned: bool = False,
        waits: bool = True,
    ) -> Iterator[tuple[ResidentDocument, bool]]:
        """The document, complete, and whether it was loaded for this caller; it stays until the block ends.

        `load` must set `handle` as soon as there is one; with `fresh` it is called even for a document in
        memory. Raises what `load` raises, Cancelled, DocumentTooLarge, and without `waits` NoRoom.
        """
        entry, mine = self._enter(ref, token_digest, (n_tokens, n_slot_rows), cancel, fresh, waits)
        entry.pinned = pinned
        try:
            if mine:
                self._load(entry, load)
            yield entry, mine
        finally:
            self._leave(entry, cancel)

    def drop(self, ref: DocumentRef) -> None:
        """Forget a document; whoever uses it may finish, then its memory is freed."""
        with self._changed:
            if entry := self._entries.get(ref):
                self._drop(entry)

    def move_out(self, ref: DocumentRef) -> None:
        """Let a document leave the device as if another needed its place; one that is in use, or still on its way,
        stays."""
        with self._changed:
            entry = self._entries.get(ref)
            if entry is None or entry.users or entry.leaving or self._move_out is None:
                return
            entry.leaving = True
            self._use(entry, CancelToken())
        self._leave_device(entry, ref)

    def release(self, ref: DocumentRef) -> ReleaseDone:
        """Forget a document, cancel its users and wait (at most 10 s) until its memory is free."""
        with self._changed:
            entry = self._entries.get(ref)
            if entry is None:
                return ReleaseDone(0, 0)
            nbytes, users = entry.nbytes, list(entry.users)
            self._drop(entry)
        for cancel in users:
            cancel.cancel(Reason.RELEASED)
        with self._changed:
            self._changed.wait_for(lambda: not entry.users, RELEASE_WAIT_S)
        return ReleaseDone(1, nbytes)

    def _enter(
        self, ref: DocumentRef, digest: str, size: Size, cancel: CancelToken, fresh: bool, waits: bool
    ) -> tuple[ResidentDocument, bool]:
        with cancel.calling(self._notify):
            while True:
                with self._changed:
                    cancel.check()
                    found = self._found(ref, digest, size, cancel, fresh)
                    leaving = None if found else self._begin_leaving(ref, size)
                    if found is None and leaving is None:
                        if not waits:
                            raise NoRoom(f"documents in use leave no memory for one of {size[0]} tokens")
                        self._wait(self._entries.get(ref))
                if found is not None:
                    return found
                if leaving is not None:
                    self._leave_device(leaving, ref)

    def _found(
        self, ref: DocumentRef, digest: str, size: Size, cancel: CancelToken, fresh: bool
    ) -> tuple[ResidentDocument, bool] | None:
        """The document if it can be used now, or a new entry for it if there is room."""
        entry = self._entries.get(ref)
        if entry is not None and (fresh or entry.token_digest != digest):
            self._drop(entry)
            entry = None
        if entry is None and (entry := self._reserve(ref, digest, size)) is not None:
            return self._use(entry, cancel), True
        if entry is not None and not entry.loading and not entry.leaving:
            return self._use(entry, cancel), False
        return None

    def _wait(self, entry: ResidentDocument | None) -> None:
        self._changed.wait()
        if entry is not None and entry.error and not isinstance(entry.error, Cancelled):
            raise entry.error

    def _use(self, entry: ResidentDocument, cancel: CancelToken) -> ResidentDocument:
        entry.users.append(cancel)
        return entry

    def _reserve(self, ref: DocumentRef, digest: str, size: Size) -> ResidentDocument | None:
        """A new entry if it fits, after evicting what nobody uses where that needs no copy, else None: nothing is
        evicted then."""
        nbytes = self._runner.document_nbytes(*size)
        if nbytes > self._budget:
            raise DocumentTooLarge(
                f"the document needs {nbytes} bytes of memory ({size[0]} tokens), "
                f"the budget for documents is {self._budget}"
            )
        idle = self._idle() if self._move_out is None else []
        if not self._has_room(nbytes, idle):
            return None
        while not self._has_room(nbytes):
            self._drop(idle.pop(0))
        self._nbytes += nbytes
        self._n_held += 1
        entry = self._entries[ref] = ResidentDocument(ref, digest, *size, nbytes)
        return entry

    def _has_room(self, nbytes: int, without: Sequence[ResidentDocument] = ()) -> bool:
        n_left = self._nbytes - sum(entry.nbytes for entry in without)
        return n_left + nbytes <= self._budget and self._n_held - len(without) < self._most

    def _idle(self) -> list[ResidentDocument]:
        """Documents that nobody uses, the first to go first."""
        return sorted((e for e in self._entries.values() if not e.users), key=lambda e: (e.pinned, e.last_used_s))

    def _begin_leaving(self, ref: DocumentRef, size: Size) -> ResidentDocument | None:
        """The next document to make room for `ref`, held by its mover; None while enough are on their way out."""
        idle = self._idle() if self._move_out is not None and ref not in self._entries else []
        going = sum(e.nbytes for e in self._entries.values() if e.leaving)
        if not idle or self._nbytes - going + self._runner.document_nbytes(*size) <= self._budget:
            return None
        idle[0].leaving = True
        return self._use(idle[0], CancelToken())

    def _leave_device(self, entry: ResidentDocument, wanted: DocumentRef) -> None:
        """Let a document move out, then free it whatever came of that."""
        assert self._move_out is not None
        try:
            self._move_out(entry, wanted)
        except SchedulerClosed:
            raise
        except Exception:
            log.exception("a document of %d tokens left the device without a copy", entry.n_tokens)
        finally:
            with self._changed:
                self._drop(entry)
            self._leave(entry, entry.users[0])

    def _load(self, entry: ResidentDocument, load: Callable[[ResidentDocument], None]) -> None:
        try:
            load(entry)
        except BaseException as error:
            with self._changed:
                entry.error = error
                self._drop(entry)
            raise
        with self._changed:
            entry.loading = False
            self._changed.notify_all()

    def _leave(self, entry: ResidentDocument, cancel: CancelToken) -> None:
        with self._changed:
            entry.users.remove(cancel)
            entry.last_used_s = time.monotonic()
            if entry.dropped and not entry.users:
                self._free(entry)
            self._changed.notify_all()

    def _drop(self, entry: ResidentDocument) -> None:
        if not entry.dropped:
            entry.dropped = True
            del self._entries[entry.ref]
            if not entry.users:
                self._free(entry)
        self._changed.notify_all()

    def _free(self, entry: ResidentDocument) -> None:
        self._nbytes -= entry.nbytes
        self._n_held -= 1
        if entry.handle is not None:
            with suppress(SchedulerClosed):
                self._scheduler.call(self._runner.free_document, entry.handle)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
