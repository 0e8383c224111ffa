"""Answering a question: document and turns into place, prompt through the batch, new turn to disk."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from cache_store.errors import MissReason, SnapshotMiss
from service.engine.host.canary import CanaryMismatch, check_canary
from service.engine.host.context import HostContext, document_key, restore
from service.engine.host.residency import ResidentDocument
from service.engine.host.tails import Tail
from service.engine.host.turns import TurnStore
from service.engine.messages import AnswerDone, AnswerEvent, AnswerRequest, AnswerStarted, AnswerText, TurnRef
from service.engine.scheduler.cancel import Cancelled, CancelToken, Reason
from service.engine.scheduler.detokenizer import Detokenizer
from service.engine.scheduler.errors import SchedulerClosed
from service.engine.scheduler.sampling import Sampler
from service.engine.scheduler.sequence import AnswerWriter, Sequence, SequenceResult
from service.engine.scheduler.stops import StopStrings

T = TypeVar("T")


class TooLong(Exception):
    """The question does not fit behind the document and the session's turns."""


class Answer:
    """One answer. `run` is called in a thread of its own, which waits; computing is the engine's thread's."""

    def __init__(
        self,
        context: HostContext,
        request: AnswerRequest,
        emit: Callable[[AnswerEvent], object],
        cancel: CancelToken,
    ) -> None:
        self._context = context
        self._request = request
        self._emit = emit
        self._cancel = cancel
        self._arrived = time.monotonic()
        self._n_prefilled = 0

    def run(self) -> AnswerDone:
        """Emits AnswerStarted and AnswerText. Raises TooLong, SnapshotMiss, Cancelled (nothing is kept then),
        DocumentTooLarge, NotFinite."""
        max_new = self._room()
        request = self._request
        with self._context.gate.admitted(self._cancel):
            queue_ms = self._elapsed_ms(self._arrived)
            asked = time.monotonic()
            with (
                self._context.residency.held(
                    request.document,
                    request.token_digest,
                    request.n_document_tokens,
                    self._restore,
                    self._cancel,
                    pinned=request.pinned,
                ) as (document, restored),
                self._tail() as tail,
            ):
                turns = TurnStore(self._context, tail)
                n_imported = -len(tail.chain)
                lost, reason = turns.restore(request.turns)
                n_imported += len(tail.chain)
                self._start(document, tail, lost, reason, restored, n_imported, queue_ms, asked)
                return self._answer(document, tail, turns, lost, max_new)

    def _room(self) -> int:
        """How many tokens may be sampled. Raises TooLong when the question leaves no room for one."""
        request, limits = self._request, self._context.runner.limits
        if request.sampling.max_tokens < 1 or not request.prompt_ids:
            raise ValueError("an answer needs a prompt and room for at least one token")
        n_turns = sum(len(turn.token_ids) for turn in request.turns)
        n_prompt = len(request.prompt_ids)
        room = min(limits.max_context - request.n_document_tokens, limits.tail_tokens) - n_turns
        if n_prompt >= room:
            raise TooLong(
                f"the question has {n_prompt} tokens; behind a document of {request.n_document_tokens} and "
                f"earlier turns of {n_turns} there is room for {max(room - 1, 0)}"
            )
        return min(request.sampling.max_tokens, room - n_prompt)

    def _restore(self, entry: ResidentDocument) -> None:
        runner, tier = self._context.runner, self._context.host_tier
        if tier is not None and tier.bring_back(entry, self._cancel.check):
            entry.source = "host"
            return
        entry.source = "disk"
        with self._context.store.open(
            document_key(entry.ref), runner.fingerprint, runner.layout, token_digest=entry.token_digest
        ) as reader:
            if reader.n_tokens != entry.n_tokens:
                raise SnapshotMiss(MissReason.TRUNCATED, f"{reader.n_tokens} tokens, not {entry.n_tokens}")
            restore(self._context, reader, entry, self._cancel.check)

    @contextmanager
    def _tail(self) -> Iterator[Tail]:
        """The session's tail; kept in its slot when the block ends well, else freed."""
        request, pool = self._request, self._context.tails
        tail = pool.take(request.session_id, request.document, request.token_digest, request.turns)
        try:
            yield tail
        except BaseException:
            with suppress(SchedulerClosed):
                pool.free(tail)
            raise
        pool.keep(tail)

    def _start(
        self,
        document: ResidentDocument,
        tail: Tail,
        lost: list[TurnRef],
        reason: MissReason | None,
        restored: bool,
        n_imported: int,
        queue_ms: float,
        asked: float,
    ) -> None:
        n_lost = sum(len(turn.token_ids) for turn in lost)
        self._cancel.check()
        self._emit(
            AnswerStarted(
                source=document.source if restored else self._context.runner.tier,
                restored_tokens=document.n_tokens * restored + n_imported,
                restore_ms=self._elapsed_ms(asked),
                reused_tokens=document.n_tokens + len(tail.chain),
                prefilled_tokens=n_lost + len(self._request.prompt_ids),
                queue_ms=queue_ms,
                miss_reason=reason,
            )
        )

    def _answer(
        self, document: ResidentDocument, tail: Tail, turns: TurnStore, lost: list[TurnRef], max_new: int
    ) -> AnswerDone:
        self._probe(document, tail)
        for turn in lost:
            result = self._compute(document, tail, Sequence(tail.slot, document.handle, turn.token_ids))
            if result.finish_reason == "cancelled":
                raise Cancelled("cancelled while an earlier turn was computed again")
            turns.save(turn.kv_id, turn.token_ids)
        result = self._compute(document, tail, self._sequence(document, tail, max_new))
        dropped = self._cancel.reason in (Reason.CLOSED, Reason.RELEASED)
        if dropped or not result.sampled_ids:
            raise Cancelled("the request was cancelled")
        nbytes = turns.save(self._request.kv_id, result.computed_ids)
        return self._done(result, nbytes)

    def _sequence(self, document: ResidentDocument, tail: Tail, max_new: int) -> Sequence:
        request, context = self._request, self._context
        stops = StopStrings(request.sampling.stop)
        writer = AnswerWriter(Detokenizer(context.decoder), stops, lambda text: self._emit(AnswerText(text)))
        return Sequence(
            tail.slot,
            document.handle,
            request.prompt_ids,
            max_new=max_new,
            sampler=Sampler(request.sampling),
            writer=writer,
            end_ids=context.end_ids,
        )

    def _compute(self, document: ResidentDocument, tail: Tail, sequence: Sequence) -> SequenceResult:
        """Run a sequence; the first on an empty tail re-feeds the document's last token, for the canary."""
        if not tail.chain:
            sequence.tokens = [document.last_token, *sequence.tokens]
            sequence.refeed = True
            if not document.verified:
                sequence.on_canary = lambda logits: self._check(document, logits)
        scheduler = self._context.scheduler
        with self._cancel.calling(lambda: scheduler.cancel(sequence)):
            scheduler.submit(sequence)
            result = self._guarded(document, sequence.done.result)
        self._n_prefilled += result.n_prefilled
        return result

    def _probe(self, document: ResidentDocument, tail: Tail) -> None:
        """A tail with earlier turns re-feeds nothing: a document new to this process is checked by itself."""
        if not document.verified and tail.chain:
            logits = self._context.last_logits(document)
            self._guarded(document, lambda: self._check(document, logits))

    def _check(self, document: ResidentDocument, logits: object) -> None:
        check_canary(document.canary, logits, self._context.runner.compute_dtype)
        document.verified = True

    def _guarded(self, document: ResidentDocument, work: Callable[[], T]) -> T:
        """`work`; a canary that does not agree takes the snapshot out of use and is a miss."""
        try:
            return work()
        except CanaryMismatch as error:
            context = self._context
            context.forget(document.ref)
            context.store.quarantine(
                document_key(document.ref), context.runner.fingerprint.digest, MissReason.CANARY, str(error)
            )
            raise SnapshotMiss(MissReason.CANARY, str(error)) from None

    def _done(self, result: SequenceResult, nbytes: int) -> AnswerDone:
        n, spent = len(result.sampled_ids), result.last_token_s - result.first_token_s
        return AnswerDone(
            finish_reason=result.finish_reason,
            token_ids=result.computed_ids,
            pending_ids=result.sampled_ids[-1:],
            completion_tokens=n,
            ttft_ms=(result.first_token_s - self._arrived) * 1e3,
            total_ms=self._elapsed_ms(self._arrived),
            decode_tokens_per_s=(n - 1) / spent if spent > 0 else 0.0,
            engine_prefilled_tokens=self._n_prefilled,
            kv_stored=nbytes > 0,
            kv_nbytes=nbytes,
        )

    @staticmethod
    def _elapsed_ms(since: float) -> float:
        return (time.monotonic() - since) * 1e3
