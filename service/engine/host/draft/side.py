"""The draft model beside the main one: its own snapshot of each document, which is a miss like any other when it is not
there, and never keeps an answer waiting.

An answer begins at once. From its first token on a thread beside it brings the draft model's rows of the document into
memory, from a snapshot or, where there is none, by reading it in the background; from then on the draft model guesses,
in the middle of the answer or from the next question on."""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from cache_store.errors import CacheStoreError, MissReason, SnapshotMiss
from service.engine.digests import digest_of
from service.engine.drafts.follower import Follower
from service.engine.host.canary import CanaryMismatch, check_canary
from service.engine.host.context import HostContext, bring_in
from service.engine.host.draft.reading import Reading
from service.engine.host.draft.seats import Seat, Seats
from service.engine.host.kept import Subject
from service.engine.host.residency import DocumentTooLarge, Residency, ResidentDocument
from service.engine.host.tails import TailPool
from service.engine.messages import AnswerRequest, BuildRequest, DocumentRef, ReleaseDone, Retention
from service.engine.protocol import Runner
from service.engine.scheduler.cancel import Cancelled, CancelToken, Reason
from service.engine.scheduler.errors import SchedulerClosed

log = logging.getLogger(__name__)

WAIT_S = 0.02
"""How often it is looked for what comes from another thread."""


@dataclass(slots=True)
class _Following:
    """An answer that the draft model is to follow. `over` once it has ended, or nothing more comes of it. `is_loading`:
    the document comes into memory, for the next question too if this answer is over before."""

    session_id: str
    main: Subject
    subject: Subject
    cancel: CancelToken = field(default_factory=CancelToken)
    over: threading.Event = field(default_factory=threading.Event)
    follower: Follower | None = None
    is_asked: bool = False
    is_loading: bool = False

    def end(self) -> None:
        self.over.set()
        if not self.is_loading:
            self.cancel.cancel(Reason.CLOSED)


class DraftSide:
    """What the draft model keeps of documents. `main` is the main model's context, whose thread, store and end of
    answers it shares; documents take `budget_nbytes`, None for as many tokens as fit the main model's."""

    def __init__(self, main: HostContext, draft: Runner, budget_nbytes: int | None) -> None:
        scheduler, block = main.scheduler, draft.layout.block_tokens
        if budget_nbytes is None:
            budget_nbytes = main.residency.max_tokens // block * draft.document_nbytes(block)
        residency, tails = Residency(scheduler, draft, budget_nbytes), TailPool(scheduler, draft)
        self.context = replace(
            main, runner=draft, residency=residency, tails=tails, host_tier=None, looks_up=False, draft=None
        )
        self._main = main
        self._budget = budget_nbytes
        self._seats = Seats(scheduler, draft, tails.n_slots)
        self._reading = Reading(self.context, main.runner)
        self._pool = ThreadPoolExecutor(max(main.tails.n_slots, 1), "draft")
        self._n_missed = 0

    def built(self, request: BuildRequest) -> None:
        """The main model's snapshot of a document is there: have the draft model read it too."""
        subjects = self._subjects(
            request.document, digest_of(request.token_ids), len(request.token_ids), request.retention
        )
        if subjects is not None:
            self._reading.want(*subjects, request.token_ids)

    @contextmanager
    def following(
        self, request: AnswerRequest, cancel: CancelToken
    ) -> "Iterator[Callable[[], Follower | None] | None]":
        """What gives the answer's follower, as soon as there is one, until the block ends; None where there will be
        none: for several documents together, and for one that is too long for the draft model."""
        subjects = None
        if not request.parts:
            subjects = self._subjects(
                request.document, request.token_digest, request.n_document_tokens, request.retention
            )
        if subjects is None:
            yield None
            return
        following = _Following(request.session_id, *subjects)
        try:
            with cancel.calling(following.over.set):
                yield lambda: self._follower(following)
        finally:
            following.end()

    def _follower(self, following: _Following) -> Follower | None:
        """Asked at each step from the first token on, which comes without waiting for what is loaded here."""
        if not following.is_asked:
            following.is_asked = True
            self._pool.submit(self._run, following)
        return following.follower

    def release(self, document: DocumentRef) -> ReleaseDone:
        """Drop a document from the draft model's memory; answers that it follows go on without."""
        self._reading.release(document)
        done = self.context.residency.release(document)
        self._seats.drop_document(document)
        return done

    def release_session(self, session_id: str) -> None:
        self._seats.drop_session(session_id)

    def stats(self) -> dict[str, int]:
        """Of `EngineStats`."""
        drafting = self.context.scheduler.drafting
        assert drafting is not None
        counters = drafting.counters
        return {
            "draft_documents": self.context.residency.n_documents,
            "draft_nbytes": self.context.residency.nbytes,
            "draft_misses_total": self._n_missed,
            "draft_document_prefill_tokens_total": counters.document_prefill_tokens,
            "draft_prefilled_tokens_total": counters.prefilled_tokens,
            "draft_steps_total": counters.steps,
            "draft_guessed_tokens_total": counters.guessed_tokens,
            "draft_accepted_tokens_total": counters.accepted_tokens,
        }

    def drain(self) -> None:
        """Stop reading documents, and begin with no other."""
        self._reading.end()

    def close(self) -> None:
        self._reading.close()
        self._pool.shutdown(wait=True)

    def _subjects(
        self, ref: DocumentRef, digest: str, n_tokens: int, retention: Retention | None
    ) -> tuple[Subject, Subject] | None:
        """A document as the main model has it, and as the draft model is to: whole, also where the main one keeps a
        part of it in memory. None when it is too long."""
        runner = self.context.runner
        if n_tokens >= runner.limits.max_context or runner.document_nbytes(n_tokens) > self._budget:
            return None
        main = Subject.of(self._main.runner, ref, digest, n_tokens, retention)
        return main, Subject(ref, digest, n_tokens, kind="draft")

    def _run(self, following: _Following) -> None:
        """Follow an answer, in a thread of its own, until it is over."""
        try:
            if not self._follow(following) and self._read(following):
                self._follow(following)
        except (Cancelled, SchedulerClosed, DocumentTooLarge):
            pass  # said and told already
        except CacheStoreError as error:
            log.warning("an answer goes on without the draft model: %s", error)
        except Exception:
            log.exception("an answer goes on without the draft model")

    def _follow(self, following: _Following) -> bool:
        """False when the snapshot is missing, or not what it should be."""
        subject, context = following.subject, self.context
        context.asked_about(subject)
        try:
            with context.residency.held(
                subject.ref,
                subject.digest,
                subject.n_tokens,
                lambda entry: self._load(following, entry),
                following.cancel,
            ) as (document, _):
                self._check(document)
                self._sit(following, document)
                return True
        except SnapshotMiss as miss:
            self._missed(miss.reason, miss.detail)
        except CanaryMismatch as error:
            self._missed(MissReason.CANARY, str(error))
            context.residency.drop(subject.ref)
            context.store.quarantine(subject.full_key, context.runner.fingerprint.digest, MissReason.CANARY, str(error))
        return False

    def _missed(self, reason: MissReason, detail: str) -> None:
        self._n_missed += 1
        log.info("the draft model's snapshot is a miss (%s): %s", reason, detail)

    def _load(self, following: _Following, entry: ResidentDocument) -> None:
        following.is_loading = True
        try:
            bring_in(self.context, following.subject, entry, following.cancel.check)
        finally:  # what is waited for after a miss ends with the answer
            following.is_loading = False

    def _read(self, following: _Following) -> bool:
        """Have the document read; whether it was before the answer was over."""
        done, over = self._reading.want(following.main, following.subject), following.over
        done.add_done_callback(lambda _: over.set() if not done.result() else None)
        while not over.wait(WAIT_S):
            if done.done():
                return True
        return False

    def _check(self, document: ResidentDocument) -> None:
        """Raises CanaryMismatch for a document new to this process that is not what it was."""
        if not document.verified:
            logits = self.context.last_logits(document)
            check_canary(document.canary, logits, self.context.runner.compute_dtype)
            document.verified = True

    def _sit(self, following: _Following, document: ResidentDocument) -> None:
        """Let the draft model guess for the answer until it is over."""
        drafting, limits = self.context.scheduler.drafting, self.context.runner.limits
        assert drafting is not None
        if following.over.is_set():
            return
        while (seat := self._seats.take(following.session_id, document.ref, document.token_digest)) is None:
            if following.over.wait(WAIT_S):  # that of an answer that has just ended is on its way
                return
        room = min(limits.tail_tokens, limits.max_context - document.n_tokens)
        follower = Follower(seat.slot, document.handle, drafting.rates, room, seat.rows)
        try:
            with following.cancel.calling(following.over.set):
                following.follower = follower
                following.over.wait()
        finally:
            self._leave(seat, follower, document)

    def _leave(self, seat: Seat, follower: Follower, document: ResidentDocument) -> None:
        """The engine's thread asks it no more: what it is doing now is over before the slot is another's."""
        failed = not self.context.scheduler.run(_ended, follower)
        if failed or document.dropped:
            self._seats.free(seat)
            return
        seat.rows = follower.rows
        self._seats.keep(seat)


def _ended(follower: Follower) -> bool:
    """Whether it was followed until now; on the engine's thread, where what ends it by a fault is over then."""
    alive = follower.alive
    follower.end()
    return alive
