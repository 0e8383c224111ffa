"""Documents that the draft model has yet to read: one after another, in the background."""

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from cache_store.errors import BudgetExceeded, BuildLocked, SnapshotMiss, StorageFailed
from cache_store.segments import WHOLE
from service.engine.host.context import HostContext
from service.engine.host.kept import Subject
from service.engine.host.opening import open_full
from service.engine.host.prefill import Prefill
from service.engine.host.residency import DocumentTooLarge, NoRoom, ResidentDocument
from service.engine.messages import DocumentRef
from service.engine.protocol import Runner
from service.engine.scheduler.cancel import Cancelled, CancelToken, Reason
from service.engine.scheduler.errors import SchedulerClosed

log = logging.getLogger(__name__)

REFUSED_S = 600.0
"""For so long what could not be read is not tried again, however often it is asked about."""
ROOM_S = 0.5
"""How often it is looked whether there is room in memory now for a document that found none."""
_LASTING = (BudgetExceeded, StorageFailed, DocumentTooLarge)


@dataclass(slots=True)
class _Wanted:
    """`main`: the document as the main model has it; `subject`: as the draft model is to. `again_s`: when it is tried
    again, for one that found no room in memory."""

    main: Subject
    subject: Subject
    token_ids: Sequence[int] | None
    cancel: CancelToken = field(default_factory=CancelToken)
    done: "Future[bool]" = field(default_factory=Future)
    again_s: float = 0.0

    def pause(self) -> None:
        """Until it is time to try; it ends when this is cancelled."""
        if (left_s := self.again_s - time.monotonic()) > 0:
            woken = threading.Event()
            with self.cancel.calling(woken.set):
                woken.wait(left_s)


class Reading:
    """Makes snapshots of the draft model from tokens, by the code that makes those of the main one. `context` is the
    draft model's, `runner` the main one."""

    def __init__(self, context: HostContext, runner: Runner) -> None:
        self._context = context
        self._runner = runner
        self._pool = ThreadPoolExecutor(1, "draft-reading")
        self._pool.submit(lambda: None)  # its thread starts here: where none can be started no build fails for it
        self._lock = threading.Lock()
        self._is_closed = False
        self._open: dict[DocumentRef, _Wanted] = {}
        self._refused: dict[tuple[DocumentRef, str], float] = {}

    def want(self, main: Subject, subject: Subject, token_ids: Sequence[int] | None = None) -> "Future[bool]":
        """Have a document read, from the tokens of the main model's snapshot where none are given, as they are when
        that was just made. Whether it was: False, too, for one that could not be read a moment ago."""
        with self._lock:
            wanted = self._open.get(subject.ref)
            if wanted is not None and wanted.subject.token_digest == subject.token_digest:
                return wanted.done
            wanted = _Wanted(main, subject, token_ids)
            if token_ids is not None:
                self._refused.pop((subject.ref, subject.token_digest), None)
            if self._is_closed or self._refused.get((subject.ref, subject.token_digest), 0.0) > time.monotonic():
                wanted.done.set_result(False)
                return wanted.done
            self._open[subject.ref] = wanted
            self._pool.submit(self._run, wanted)
        return wanted.done

    def release(self, ref: DocumentRef) -> None:
        """Give a document up: it is being deleted."""
        with self._lock:
            wanted = self._open.get(ref)
        if wanted is not None:
            wanted.cancel.cancel(Reason.RELEASED)

    def end(self) -> None:
        """Stop what runs and take nothing more; a question after the next start has it read from the beginning."""
        with self._lock:
            self._is_closed = True
            open_now = list(self._open.values())
        for wanted in open_now:
            wanted.cancel.cancel(Reason.DRAIN)

    def close(self) -> None:
        self.end()
        self._pool.shutdown(wait=True)

    def _run(self, wanted: _Wanted) -> None:
        is_read = self._try(wanted)
        with self._lock:
            is_open = self._open.get(wanted.subject.ref) is wanted
            if is_read is None and is_open and not self._is_closed:
                wanted.again_s = time.monotonic() + ROOM_S
                self._pool.submit(self._run, wanted)  # behind the others, which may be shorter
                return
            if is_open:
                del self._open[wanted.subject.ref]
        wanted.done.set_result(bool(is_read))

    def _try(self, wanted: _Wanted) -> bool | None:
        """Whether it was read; None where there is no room in memory now."""
        subject = wanted.subject
        try:
            wanted.pause()
            wanted.cancel.check()
            self._read(wanted)
            return True
        except NoRoom as error:
            if not wanted.again_s:
                log.info("the draft model has not read a document yet: %s", error)
            return None
        except (Cancelled, SchedulerClosed):
            pass
        except (SnapshotMiss, BuildLocked) as error:  # it is being deleted, or read by another process
            log.info("the draft model has not read a document of %d tokens: %s", subject.n_tokens, error)
        except _LASTING as error:
            self._refuse(subject)
            log.warning("the draft model has not read a document of %d tokens: %s", subject.n_tokens, error)
        except Exception:
            self._refuse(subject)
            log.exception("the draft model could not read a document of %d tokens", subject.n_tokens)
        return False

    def _refuse(self, subject: Subject) -> None:
        now = time.monotonic()
        self._refused = {name: until for name, until in self._refused.items() if until > now}
        self._refused[subject.ref, subject.token_digest] = now + REFUSED_S

    def _read(self, wanted: _Wanted) -> None:
        if self._is_there(wanted.subject):
            return
        token_ids = wanted.token_ids
        if token_ids is None:
            with open_full(self._context.store, self._runner, wanted.main) as reader:
                token_ids = [int(token) for token in reader.token_ids]
        self._compute(wanted.subject, token_ids, wanted.cancel)
        self._keep_beside(wanted)

    def _is_there(self, subject: Subject) -> bool:
        """What is not valid is quarantined by the store."""
        try:
            with open_full(self._context.store, self._context.runner, subject):
                return True
        except SnapshotMiss:
            return False

    def _compute(self, subject: Subject, token_ids: Sequence[int], cancel: CancelToken) -> None:
        """Memory comes first: what is begun takes its room on the disk from others. Raises NoRoom."""
        context = self._context
        runner = context.runner
        if max(token_ids) >= runner.limits.vocab_size:
            raise ValueError("the document has a token that the draft model has not")

        def load(entry: ResidentDocument) -> None:
            with context.store.begin(subject.full_key, runner.fingerprint, runner.layout, token_ids) as builder:
                try:
                    Prefill(context, token_ids, WHOLE, lambda _: None, cancel).run(entry, builder, is_all=True)
                except Cancelled:
                    if cancel.reason is Reason.RELEASED:
                        builder.abort()
                    raise

        with context.residency.held(
            subject.ref, subject.digest, subject.n_tokens, load, cancel, fresh=True, waits=False
        ):
            pass

    def _keep_beside(self, wanted: _Wanted) -> None:
        """What was made of a document does not outlive it, where that was deleted meanwhile. Raises SnapshotMiss
        then."""
        store, subject = self._context.store, wanted.subject
        try:
            open_full(store, self._runner, wanted.main).close()
        except SnapshotMiss:
            self._context.residency.drop(subject.ref)
            store.delete(subject.full_key)
            raise
