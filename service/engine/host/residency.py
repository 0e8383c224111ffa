"""Documents in memory: one copy of each however many answers use it, least recently used out first."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from service.engine.messages import DocumentRef, ReleaseDone
from service.engine.protocol import Runner, SizesDocuments
from service.engine.scheduler.cancel import Cancelled, CancelToken, Reason
from service.engine.scheduler.errors import SchedulerClosed
from service.engine.scheduler.loop import Scheduler

RELEASE_WAIT_S = 10.0


class DocumentTooLarge(Exception):
    """The document alone needs more memory than there is for documents."""


@dataclass(slots=True, eq=False)
class ResidentDocument:
    """`handle` is the runner's. `verified`: its canary agreed, or it was computed here."""

    ref: DocumentRef
    token_digest: str
    n_tokens: int
    nbytes: int
    handle: Any = None
    last_token: int = -1
    canary: Any = None
    verified: bool = False
    loading: bool = True
    dropped: bool = False
    error: BaseException | None = None
    users: list[CancelToken] = field(default_factory=list)
    last_used_s: float = 0.0


class Residency:
    """Who uses which document. `budget_nbytes` bounds all documents together, those in use included.

    A document is loaded by the first who asks; others wait for it and share its error, if it fails. Lock
    order: this lock, then the scheduler's.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, budget_nbytes: int) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._budget = budget_nbytes
        self._changed = threading.Condition()
        self._entries: dict[DocumentRef, ResidentDocument] = {}
        self._nbytes = 0
        self._token_nbytes = scheduler.run(_measure_token, runner)

    @property
    def n_documents(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest document that fits the budget."""
        return self._budget // self._token_nbytes

    @property
    def n_references(self) -> int:
        with self._changed:
            return sum(len(entry.users) for entry in self._entries.values())

    @contextmanager
    def held(
        self,
        ref: DocumentRef,
        token_digest: str,
        n_tokens: int,
        load: Callable[[ResidentDocument], None],
        cancel: CancelToken,
        *,
        fresh: bool = False,
    ) -> Iterator[tuple[ResidentDocument, bool]]:
        """The document, complete, and whether it was loaded for this caller; it stays until the block ends.

        `load` must set `handle` as soon as there is one; with `fresh` it is called even for a document in
        memory. Raises what `load` raises, Cancelled, DocumentTooLarge.
        """
        entry, mine = self._enter(ref, token_digest, n_tokens, cancel, fresh)
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
        self, ref: DocumentRef, digest: str, n_tokens: int, cancel: CancelToken, fresh: bool
    ) -> tuple[ResidentDocument, bool]:
        with cancel.calling(self._notify), self._changed:
            while True:
                cancel.check()
                entry = self._entries.get(ref)
                if entry is not None and (fresh or entry.token_digest != digest):
                    self._drop(entry)
                    entry = None
                if entry is None and (entry := self._reserve(ref, digest, n_tokens)) is not None:
                    return self._use(entry, cancel), True
                if entry is not None and not entry.loading:
                    return self._use(entry, cancel), False
                self._changed.wait()
                if entry is not None and entry.error and not isinstance(entry.error, Cancelled):
                    raise entry.error

    def _use(self, entry: ResidentDocument, cancel: CancelToken) -> ResidentDocument:
        entry.users.append(cancel)
        return entry

    def _reserve(self, ref: DocumentRef, digest: str, n_tokens: int) -> ResidentDocument | None:
        """A new entry if it fits after evicting what nobody uses, else None."""
        nbytes = self._document_nbytes(n_tokens)
        if nbytes > self._budget:
            raise DocumentTooLarge(
                f"the document needs {nbytes} bytes of memory ({n_tokens} tokens), "
                f"the budget for documents is {self._budget}"
            )
        idle = sorted((e for e in self._entries.values() if not e.users), key=lambda e: e.last_used_s)
        while idle and self._nbytes + nbytes > self._budget:
            self._drop(idle.pop(0))
        if self._nbytes + nbytes > self._budget:
            return None
        self._nbytes += nbytes
        entry = self._entries[ref] = ResidentDocument(ref, digest, n_tokens, nbytes)
        return entry

    def _document_nbytes(self, n_tokens: int) -> int:
        runner = self._runner
        return runner.document_nbytes(n_tokens) if isinstance(runner, SizesDocuments) else n_tokens * self._token_nbytes

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
        if entry.handle is not None:
            with suppress(SchedulerClosed):
                self._scheduler.call(self._runner.free_document, entry.handle)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _measure_token(runner: Runner) -> int:
    """Bytes of a document's token in memory; of runners that keep it decoded the layout does not say it."""
    n_tokens = runner.limits.chunk_tokens
    if isinstance(runner, SizesDocuments):
        return -(-runner.document_nbytes(n_tokens) // n_tokens)
    document = runner.new_document(n_tokens)
    nbytes = document.nbytes
    runner.free_document(document)
    return -(-nbytes // n_tokens)
