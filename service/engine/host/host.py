"""The engine as one object: calls from any thread, events through a callback."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import psutil

from cache_store.errors import BudgetExceeded, BuildLocked, SnapshotMiss, StorageFailed
from cache_store.store import SnapshotStore
from service.engine.drafts.lookup import DocumentLookup
from service.engine.fetch.index import KeyIndex
from service.engine.fetch.sentences import starts_finder
from service.engine.host.answer import Answer, TooLong
from service.engine.host.build import Build
from service.engine.host.cold import ColdDocuments, DocumentMiss
from service.engine.host.context import HostContext
from service.engine.host.host_tier import HostTier
from service.engine.host.kept import documents_of, holds
from service.engine.host.opening import open_full
from service.engine.host.residency import DocumentTooLarge, Residency
from service.engine.host.tails import TailPool
from service.engine.host.warm import prepare_memory
from service.engine.messages import (
    AnswerEvent,
    AnswerRequest,
    BuildDone,
    BuildEvent,
    BuildRequest,
    DocumentRef,
    EngineInfo,
    EngineStats,
    Failed,
    ReleaseDone,
)
from service.engine.protocol import Runner
from service.engine.scheduler.admission import FifoGate
from service.engine.scheduler.cancel import Cancelled, CancelToken, Reason
from service.engine.scheduler.detokenizer import Decoder
from service.engine.scheduler.errors import SchedulerClosed
from service.engine.scheduler.loop import Scheduler

log = logging.getLogger(__name__)

BUILD_THREADS = 4
ANSWER_THREADS = 64
"""Requests beyond these wait in order for a thread; they still can be cancelled."""
INDEX_BUDGET_NBYTES = 512 << 20
DRAINING = Failed("busy", "the engine is shutting down", retryable=True)


class EngineHost:
    """Builds and answers over a runner and a snapshot store.

    `build` and `answer` return at once; their events come from other threads. At most `max_batch` answers run
    at once, others wait in order. `end_ids` end an answer. `index_heads`: the model's, pairs of layer and KV head, by
    which cold tokens of windowed documents are found; their keys may take `index_budget_nbytes` of the memory where
    the runner computes. `replay_ids` ask the model to repeat what it sees. `fetch_rounds` 2 looks once more, for what
    the best passage names. `draft`: a smaller model with the same vocabulary, whose documents may take
    `draft_budget_nbytes`, None for what as many tokens take of it as fit `resident_budget_nbytes` of the main one.
    """

    def __init__(
        self,
        runner: Runner,
        store: SnapshotStore,
        decoder: Decoder,
        end_ids: frozenset[int],
        *,
        resident_budget_nbytes: int,
        max_batch: int | None = None,
        engine: str = "torch",
        index_heads: Sequence[tuple[int, int]] = (),
        index_budget_nbytes: int = INDEX_BUDGET_NBYTES,
        replay_ids: Sequence[int] = (),
        fetch_rounds: int = 1,
        draft: Runner | None = None,
        draft_budget_nbytes: int | None = None,
    ) -> None:
        scheduler = Scheduler(runner, draft=draft)
        tier = HostTier(scheduler, runner, runner.host_copies) if runner.host_copies is not None else None
        residency = Residency(scheduler, runner, resident_budget_nbytes, tier.move_out if tier else None)
        tails = TailPool(scheduler, runner)
        places = min(max_batch or tails.n_slots, tails.n_slots)
        cold = _cold_documents(scheduler, runner, store, decoder, index_heads, index_budget_nbytes)
        context = HostContext(
            runner,
            scheduler,
            store,
            residency,
            tails,
            FifoGate(places),
            cold,
            decoder,
            end_ids,
            tuple(replay_ids),
            tier,
            fetch_rounds,
        )
        self._context = _with_draft(context, draft, draft_budget_nbytes)
        self._builds = _Requests("build", BUILD_THREADS)
        self._answers = _Requests("answer", ANSWER_THREADS)
        self._draining = False
        self._preparing = prepare_memory(runner, store, residency.max_tokens // 2)
        self.info = _info(self._context, engine, places, len(index_heads))

    @property
    def alive(self) -> bool:
        return self._context.scheduler.alive

    @property
    def has_host_tier(self) -> bool:
        """Whether documents that leave the device go to host memory."""
        return self._context.host_tier is not None

    def build(self, request: BuildRequest, emit: Callable[[BuildEvent], object]) -> "Future[None]":
        """Find or make a document's snapshot; events end with BuildDone or Failed."""
        return self._serve(self._builds, request.request_id, emit, lambda c: self._build(request, emit, c))

    def answer(self, request: AnswerRequest, emit: Callable[[AnswerEvent], object]) -> "Future[None]":
        """Answer a question; events end with AnswerDone or Failed."""
        return self._serve(
            self._answers, request.request_id, emit, lambda c: Answer(self._context, request, emit, c).run()
        )

    def _build(self, request: BuildRequest, emit: Callable[[BuildEvent], object], cancel: CancelToken) -> BuildDone:
        done = Build(self._context, request, emit, cancel).run()
        if self._context.draft is not None:
            self._context.draft.built(request)
        return done

    def cancel(self, request_id: str, reason: Reason = Reason.ASKED) -> None:
        """Stop a request at its next step. Unknown ids are ignored."""
        for requests in (self._builds, self._answers):
            if token := requests.open.get(request_id):
                token.cancel(reason)

    def release(self, document: DocumentRef) -> ReleaseDone:
        """Drop a document from memory, its answers and builds included, also those over several documents."""
        residency, tier, tails = self._context.residency, self._context.host_tier, self._context.tails
        released = [residency.release(ref) for ref in residency.refs if holds(ref, document)]
        held = [tier.forget(ref) for ref in tier.refs if holds(ref, document)] if tier is not None else []
        n_index = self._context.cold.drop(document)
        tails.drop_document(document)
        # Last: no answer is left then that would bring it into the draft model's memory again.
        drafted = self._context.draft.release(document) if self._context.draft is not None else ReleaseDone(0, 0)
        n_objects = sum(each.objects for each in released) + len(held) + (n_index > 0) + drafted.objects
        return ReleaseDone(n_objects, sum(each.nbytes for each in released) + sum(held) + n_index + drafted.nbytes)

    def move_out(self, document: DocumentRef) -> bool:
        """Let a document that nobody uses leave the device as if another needed its place; whether host memory has it
        now."""
        self._context.residency.move_out(document)
        return self._context.host_tier is not None and document in self._context.host_tier.refs

    def release_session(self, session_id: str) -> None:
        self._context.tails.drop_session(session_id)
        if self._context.draft is not None:
            self._context.draft.release_session(session_id)

    def check(self) -> float:
        """Decode one token without a document; milliseconds. Raises SchedulerClosed."""
        started = time.monotonic()
        self._context.decode_one()
        return (time.monotonic() - started) * 1e3

    def stats(self) -> EngineStats:
        c = self._context
        counters = c.scheduler.counters
        return EngineStats(
            prefilled_tokens_total=counters.prefilled_tokens,
            decoded_tokens_total=counters.decoded_tokens,
            steps_total=counters.steps,
            drafted_tokens_total=counters.drafted_tokens,
            accepted_tokens_total=counters.accepted_tokens,
            document_prefill_tokens_total=counters.document_prefill_tokens,
            running=c.gate.n_inside,
            waiting=c.gate.n_waiting,
            resident_documents=c.residency.n_documents,
            resident_nbytes=c.residency.nbytes,
            document_references=c.residency.n_references,
            tail_slots_used=c.tails.n_used,
            host_documents=c.host_tier.n_documents if c.host_tier else 0,
            host_nbytes=c.host_tier.nbytes if c.host_tier else 0,
            index_documents=c.cold.n_documents,
            index_nbytes=c.cold.nbytes,
            lookup_nbytes=self._lookup_nbytes(),
            rss_nbytes=psutil.Process().memory_info().rss,
            documents=self._documents(),
            **(c.draft.stats() if c.draft is not None else {}),
        )

    def _lookup_nbytes(self) -> int:
        """Of those in the memory of the device or host, and of windowed documents."""
        c = self._context
        lookups = [*c.residency.lookups, *(c.host_tier.lookups if c.host_tier is not None else [])]
        return sum({id(lookup): lookup.nbytes for lookup in lookups}.values()) + c.cold.lookup_nbytes

    def _documents(self) -> list[DocumentRef]:
        """Those with rows in the memory of the device or host."""
        tier = self._context.host_tier
        refs = [*self._context.residency.refs, *(tier.refs if tier is not None else [])]
        return list(dict.fromkeys(document for ref in refs for document in documents_of(ref)))

    def drain(self, deadline_s: float) -> None:
        """Take no more requests. Builds stop at once, their journals stay; answers may end for half the time,
        then are ended with what they have."""
        self._draining = True
        until = time.monotonic() + deadline_s
        self._builds.cancel_all(Reason.DRAIN)
        if self._context.draft is not None:
            self._context.draft.drain()
        self._answers.wait_idle(deadline_s / 2)
        self._answers.cancel_all(Reason.DRAIN)
        for requests in (self._answers, self._builds):
            requests.wait_idle(max(until - time.monotonic(), 0))

    def wait_ended(self) -> None:
        """Block until the engine's thread has ended, by `close` or by a fault."""
        self._context.scheduler.join()

    def close(self) -> None:
        """End the engine's thread; open requests fail as `engine_lost`."""
        self._draining = True
        self._preparing.join()
        self._context.scheduler.close()
        for requests in (self._answers, self._builds):
            requests.pool.shutdown(wait=True)
        if self._context.draft is not None:
            self._context.draft.close()
        self._context.cold.close()
        self._context.store.close()
        if self._context.host_tier is not None:
            self._context.host_tier.close()

    def _serve(
        self,
        requests: "_Requests",
        request_id: str,
        emit: Callable[[Any], object],
        work: Callable[[CancelToken], object],
    ) -> "Future[None]":
        if self._draining:
            emit(DRAINING)
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return requests.start(request_id, lambda token: emit(_outcome(work, token)))


def _with_draft(context: HostContext, draft: Runner | None, budget_nbytes: int | None) -> HostContext:
    """Where guesses are taken at all."""
    if draft is None or context.scheduler.drafting is None:
        return context
    from service.engine.host.draft.side import DraftSide

    return replace(context, draft=DraftSide(context, draft, budget_nbytes))


def _info(context: HostContext, engine: str, places: int, n_index_heads: int) -> EngineInfo:
    runner, draft = context.runner, context.draft
    return EngineInfo(
        engine=engine,
        model_name=runner.name,
        compute_dtype=runner.compute_dtype,
        kv_type=str(runner.layout.kv_type),
        fingerprint=asdict(runner.fingerprint),
        fingerprint_digest=runner.fingerprint.digest,
        max_context=runner.limits.max_context,
        bytes_per_token=runner.layout.bytes_per_token,
        block_tokens=runner.layout.block_tokens,
        max_batch=places,
        pid=os.getpid(),
        tail_tokens=runner.limits.tail_tokens,
        resident_tokens=context.residency.max_tokens,
        sink_multiple=runner.limits.sink_multiple,
        n_index_heads=n_index_heads,
        has_slots=runner.limits.ragged_slots,
        draft_model=draft.context.runner.name if draft is not None else "",
    )


def _cold_documents(
    scheduler: Scheduler,
    runner: Runner,
    store: SnapshotStore,
    decoder: Decoder,
    heads: Sequence[tuple[int, int]],
    budget_nbytes: int,
) -> ColdDocuments:
    place = _index_placer(scheduler, runner)
    look_up = (lambda _: None) if scheduler.planner is None else DocumentLookup
    return ColdDocuments(
        partial(open_full, store, runner), heads, budget_nbytes, starts_finder(decoder), place, look_up
    )


def _index_placer(scheduler: Scheduler, runner: Runner) -> Callable[[KeyIndex], None] | None:
    """What takes an index to the runner's device; None where that computes in host memory anyway."""
    device = runner.device
    return None if device.type == "cpu" else lambda index: scheduler.run(index.move_to, device)


class _Requests:
    """Open requests of one kind, each in a thread."""

    def __init__(self, name: str, n_threads: int) -> None:
        self.pool = ThreadPoolExecutor(n_threads, name)
        self.open: dict[str, CancelToken] = {}
        self._changed = threading.Condition()

    def start(self, request_id: str, run: Callable[[CancelToken], object]) -> "Future[None]":
        token = CancelToken()
        with self._changed:
            self.open[request_id] = token
        return self.pool.submit(self._run, request_id, token, run)

    def cancel_all(self, reason: Reason) -> None:
        with self._changed:
            tokens = list(self.open.values())
        for token in tokens:
            token.cancel(reason)

    def wait_idle(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.open, timeout_s)

    def _run(self, request_id: str, token: CancelToken, run: Callable[[CancelToken], object]) -> None:
        try:
            run(token)
        finally:
            with self._changed:
                self.open.pop(request_id, None)
                self._changed.notify_all()


def _outcome(work: Callable[[CancelToken], object], token: CancelToken) -> object:
    """The last event of a request."""
    try:
        token.check()
        return work(token)
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> Failed:
    """The event for an error; only what no table entry explains is logged with its traceback."""
    match error:
        case Cancelled():
            return Failed("cancelled", str(error))
        case SnapshotMiss():
            of = error.ref.document_id if isinstance(error, DocumentMiss) else None
            return Failed("snapshot_miss", error.detail, True, str(error.reason), of)
        case TooLong() | DocumentTooLarge():
            return Failed("too_long", str(error))
        case BudgetExceeded() | StorageFailed():
            return Failed("storage", str(error))
        case BuildLocked():
            return Failed("busy", str(error), retryable=True)
        case SchedulerClosed():
            return Failed("engine_lost", str(error), retryable=True)
    log.error("a request failed", exc_info=error)
    return Failed("internal", f"{type(error).__name__}: {error}")
