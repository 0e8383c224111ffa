"""Answering a question: document and turns into place, prompt through the batch, new turn to disk."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from cache_store.errors import MissReason, SnapshotMiss
from service.engine.drafts.drafter import Drafter
from service.engine.host.canary import CanaryMismatch, check_canary
from service.engine.host.context import HostContext
from service.engine.host.fetching import NOTHING, Fetched, Fetcher
from service.engine.host.looking import Pieces, looks_of_answer, watch
from service.engine.host.residency import ResidentDocument
from service.engine.host.sources import source_of
from service.engine.host.tails import Tail
from service.engine.host.turns import TurnStore
from service.engine.messages import (
    AnswerDone,
    AnswerEvent,
    AnswerRequest,
    AnswerStarted,
    AnswerText,
    PieceLooks,
    TurnRef,
)
from service.engine.scheduler.cancel import Cancelled, CancelToken, Reason
from service.engine.scheduler.detokenizer import Detokenizer
from service.engine.scheduler.errors import SchedulerClosed
from service.engine.scheduler.sampling import Sampler
from service.engine.scheduler.sequence import AnswerWriter, Sequence, SequenceResult
from service.engine.scheduler.stops import StopStrings

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Placed:
    """What of an answer's context was in place before anything was computed for it."""

    n_loaded: int
    n_turn_tokens: int
    n_lost_tokens: int
    source: str
    miss_reason: MissReason | None
    ms: float


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
        self._source = source_of(context, request)
        self._emit = emit
        self._cancel = cancel
        self._arrived = time.monotonic()
        self._n_prefilled = 0

    def run(self) -> AnswerDone:
        """Emits AnswerStarted and AnswerText. Raises TooLong, SnapshotMiss, Cancelled (nothing is kept then),
        DocumentTooLarge, NotFinite."""
        max_new = self._room()
        with self._context.gate.admitted(self._cancel), ExitStack() as held:
            queue_ms = self._elapsed_ms(self._arrived)
            asked = time.monotonic()
            document, restored, fetcher = held.enter_context(self._source.opened(self._cancel))
            tail = held.enter_context(self._tail())
            turns = TurnStore(self._context, tail)
            n_here = tail.n_tokens
            lost, reason = turns.restore(self._request.turns)
            placed = _Placed(
                n_loaded=self._source.n_resident * restored + tail.n_tokens - n_here,
                n_turn_tokens=tail.n_tokens,
                n_lost_tokens=sum(len(turn.token_ids) for turn in lost),
                source=document.source if restored else self._context.runner.tier,
                miss_reason=reason,
                ms=self._elapsed_ms(asked),
            )
            self._cancel.check()
            self._probe(document, tail)
            for turn in lost:
                self._compute_lost(document, tail, turns, turn, fetcher)
            fetched = self._fetch(document, tail, fetcher)
            self._start(placed, fetched, queue_ms)
            drafter = self._drafter(document, fetcher, held)
            return self._answer(document, tail, turns, fetched, self._sequence(document, tail, drafter, max_new))

    def _room(self) -> int:
        """How many tokens may be sampled. Raises TooLong when the question leaves no room for one."""
        request, limits = self._request, self._context.runner.limits
        if request.sampling.max_tokens < 1 or not request.prompt_ids:
            raise ValueError("an answer needs a prompt and room for at least one token")
        n_turns, n_prompt = sum(len(turn.token_ids) for turn in request.turns), len(request.prompt_ids)
        first = self._source.next_position
        room = min(limits.max_context - first, limits.tail_tokens - self._fetch_room()) - n_turns
        if n_prompt >= room:
            raise TooLong(
                f"the question has {n_prompt} tokens; behind a document of {first} and "
                f"earlier turns of {n_turns} there is room for {max(room - 1, 0)}"
            )
        return min(request.sampling.max_tokens, room - n_prompt)

    def _fetch_room(self) -> int:
        """Rows that fetched tokens may take of the tail: for this question, or for a turn to be computed again."""
        of_turns = [sum(span.n_tokens for span in turn.spans) for turn in self._request.turns]
        return max(self._source.fetch_tokens, *of_turns, 0)

    @contextmanager
    def _tail(self) -> Iterator[Tail]:
        """The session's tail; kept in its slot when the block ends well, else freed."""
        request, pool = self._request, self._context.tails
        tail = pool.take(request.session_id, self._source.ref, self._source.digest, request.turns)
        try:
            yield tail
        except BaseException:
            with suppress(SchedulerClosed):
                pool.free(tail)
            raise
        pool.keep(tail)

    def _fetch(self, document: ResidentDocument, tail: Tail, fetcher: Fetcher | None) -> Fetched:
        self._cancel.check()
        if fetcher is None:
            return NOTHING
        request = self._request
        return fetcher.fetch(document, tail, request.prompt_ids, request.turns[-1] if request.turns else None)

    def _start(self, placed: _Placed, fetched: Fetched, queue_ms: float) -> None:
        self._cancel.check()
        self._emit(
            AnswerStarted(
                source=placed.source,
                restored_tokens=placed.n_loaded,
                restore_ms=placed.ms,
                reused_tokens=self._request.n_document_tokens + placed.n_turn_tokens,
                prefilled_tokens=placed.n_lost_tokens + len(self._request.prompt_ids),
                queue_ms=queue_ms,
                miss_reason=placed.miss_reason,
                spans=list(fetched.spans),
                fetch_ms=fetched.ms,
                first_pass_tokens=fetched.first_pass_tokens,
                second_pass_tokens=fetched.second_pass_tokens,
            )
        )

    def _compute_lost(
        self, document: ResidentDocument, tail: Tail, turns: TurnStore, turn: TurnRef, fetcher: Fetcher | None
    ) -> None:
        """Compute an earlier turn again, seeing what it saw."""
        if fetcher is not None:
            fetcher.bring(tail, turn.spans)
        result = self._compute(document, tail, Sequence(tail.slot, document.handle, turn.token_ids))
        if result.finish_reason == "cancelled":
            raise Cancelled("cancelled while an earlier turn was computed again")
        turns.save(turn.kv_id, turn.token_ids, turn.spans)

    def _answer(
        self, document: ResidentDocument, tail: Tail, turns: TurnStore, fetched: Fetched, sequence: Sequence
    ) -> AnswerDone:
        watch(self._context, tail)
        result = self._compute(document, tail, sequence)
        dropped = self._cancel.reason in (Reason.CLOSED, Reason.RELEASED)
        if dropped or not result.sampled_ids:
            raise Cancelled("the request was cancelled")
        looks = self._looks(document, tail, fetched, sequence)
        nbytes = turns.save(self._request.kv_id, result.computed_ids, fetched.spans)
        return self._done(result, nbytes, *looks)

    def _looks(
        self, document: ResidentDocument, tail: Tail, fetched: Fetched, sequence: Sequence
    ) -> tuple[list[PieceLooks], float]:
        """Where the answer looked. An answer without it is better than none."""
        try:
            assert sequence.writer is not None
            pieces = Pieces.of(sequence.writer, len(sequence.sampled))
            return looks_of_answer(self._context, document, tail, fetched, self._source.ranges, pieces)
        except (RuntimeError, ValueError):
            if not self._context.scheduler.alive:
                raise
            log.exception("where an answer looked is not known")
            return [], 0.0

    def _sequence(self, document: ResidentDocument, tail: Tail, drafter: Drafter | None, max_new: int) -> Sequence:
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
            drafter=drafter,
        )

    def _drafter(self, document: ResidentDocument, fetcher: Fetcher | None, held: ExitStack) -> Drafter | None:
        """Guesses from the whole of what the answer is about, whatever is in memory of it, and from the session; those
        of a draft model as long as `held` lasts."""
        request, planner = self._request, self._context.scheduler.planner
        if planner is None:
            return None
        lookups = [document.lookup] if document.lookup is not None else []
        if fetcher is not None:
            lookups = fetcher.lookups
        said = [token for turn in request.turns for token in turn.token_ids] + request.prompt_ids
        draft = self._context.draft
        follow = held.enter_context(draft.following(request, self._cancel)) if draft is not None else None
        return Drafter(lookups, said, planner.rates, follow)

    def _compute(self, document: ResidentDocument, tail: Tail, sequence: Sequence) -> SequenceResult:
        """Run a sequence; the first on an empty tail re-feeds the document's last token, for the canary."""
        if not tail.turns:
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
        if not document.verified and tail.turns:
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
            self._context.forget(document.ref)
            self._source.set_aside(str(error))
            raise SnapshotMiss(MissReason.CANARY, str(error)) from None

    def _done(self, result: SequenceResult, nbytes: int, looks: list[PieceLooks], looks_ms: float) -> AnswerDone:
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
            looks=looks,
            looks_ms=looks_ms,
            steps=result.n_steps,
            drafted_tokens=result.n_drafted,
            accepted_tokens=result.n_accepted,
        )

    @staticmethod
    def _elapsed_ms(since: float) -> float:
        return (time.monotonic() - since) * 1e3
