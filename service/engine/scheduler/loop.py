"""The engine's thread: the only caller of a runner.

Each turn of the loop does the calls that other threads asked for, one step for all sequences, and one chunk
of one document. A draft model is a second runner of the same thread: its guesses come before a step, its chunks of
documents among the others. Inside a chunk, after each of its layers, calls and steps are done again, so that streams go
on while a document is read; at least `prefill_share` of that time stays the document's.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from service.engine.drafts.planner import MOST_ROWS, DraftPlanner
from service.engine.mailbox import one_wake
from service.engine.protocol import Runner
from service.engine.scheduler.batching import Part, compose
from service.engine.scheduler.chunks import Chunk, ChunkCancelled, ChunkQueue
from service.engine.scheduler.errors import SchedulerClosed
from service.engine.scheduler.sampling import Sampler
from service.engine.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from service.engine.drafts.model import DraftModel

log = logging.getLogger(__name__)
T = TypeVar("T")

CALL_SLICE_S = 0.02
"""Calls are done for at most this long between two steps, so that a restore does not hold up streams."""

LOST = "the device answers no more calls; the engine ends"


@dataclass(slots=True)
class Counters:
    """Only grow. `prefilled_tokens` includes those of documents; rows that are re-fed, replayed or computed to find
    spans are in none of them. `drafted_tokens` were guessed and computed, `accepted_tokens` of these were sampled."""

    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    steps: int = 0
    document_prefill_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Scheduler:
    """Runs sequences and document chunks on a runner. All public methods may be called from any thread.

    `prefill_rows`: rows of prompts in one step. `prefill_share`: the part of the time that a document's
    prefill keeps while sequences run. `max_gap_s`: a step is due in a chunk after this time at the latest. `planner`
    says how many drafts are computed, None where the runner takes none. `draft`: a model that guesses them too; it is
    called by the same thread, and what it computes is counted in `drafting`.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        prefill_rows: int = 256,
        prefill_share: float = 0.4,
        max_gap_s: float = 0.15,
        draft: Runner | None = None,
    ) -> None:
        self.counters = Counters()
        limits = runner.limits
        self.planner = (
            DraftPlanner(limits.draft_tokens, limits.draft_rows or MOST_ROWS) if limits.draft_tokens else None
        )
        self.drafting = self._lead(runner, draft)
        self._runner = runner
        self._draft = draft
        self._prefill_rows = prefill_rows
        self._share = prefill_share
        self._max_gap_s = max_gap_s
        self._wake = threading.Condition()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._arriving: deque[Sequence] = deque()
        self._sequences: list[Sequence] = []
        self._chunks = ChunkQueue()
        self._chunk: Chunk | None = None
        self._step_s = 0.0
        self._stepped_at = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    def _lead(self, runner: Runner, draft: Runner | None) -> "DraftModel | None":
        """Have a draft model guess, where guesses are taken at all."""
        if draft is None or self.planner is None:
            return None
        from service.engine.drafts.leader import Leader
        from service.engine.drafts.model import DraftModel

        model = DraftModel(draft, runner.limits.vocab_size)
        self.planner.leader = Leader(model)
        return model

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    @property
    def n_running(self) -> int:
        return len(self._sequences) + len(self._arriving)

    def call(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Do `function(*arguments)` on the engine's thread, in order, between two steps or layers."""
        done: Future[T] = Future()
        self._enqueue(lambda: self._calls.append((done, lambda: function(*arguments))))
        return done

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """`call`, and wait for its result. On the engine's own thread it is a plain call."""
        if threading.current_thread() is self._thread:
            return function(*arguments)
        return self.call(function, *arguments).result()

    def submit(self, sequence: Sequence) -> None:
        """Let a sequence join at the next step. Its slot must be free of other sequences."""
        self._enqueue(lambda: self._arriving.append(sequence))

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence before its next step, with what it has got."""
        sequence.cancelled = True
        with self._wake:
            self._wake.notify()

    def prefill(
        self,
        document: Any,
        tokens: Seq[int],
        is_cancelled: Callable[[], bool] = lambda: False,
        runner: Runner | None = None,
    ) -> "Future[list[list[memoryview]]]":
        """Queue the next chunk of a document, of the draft model's where that is `runner`. Fails with ChunkCancelled,
        the document unchanged, when `is_cancelled` becomes true."""
        chunk = (runner or self._runner).prefill_chunk
        is_draft = runner is not None and runner is self._draft
        return self._put(Chunk(document, len(tokens), partial(chunk, document, tokens), is_cancelled, is_draft))

    def replay(
        self,
        document: Any,
        tokens: Seq[int],
        sinks: int,
        first: int,
        last: int,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> "Future[Any]":
        """Queue `Runner.replay` of tokens [first, last) of a document; as `prefill`."""
        return self._put(
            Chunk(document, 0, partial(self._runner.replay, document, tokens, sinks, first, last), is_cancelled)
        )

    def _put(self, chunk: Chunk) -> "Future[Any]":
        self._enqueue(lambda: self._chunks.put(chunk))
        return chunk.done

    def join(self) -> None:
        """Wait for the thread to end."""
        self._thread.join()

    def close(self) -> None:
        """End the thread after its current step or layer; what is still open fails with SchedulerClosed."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _enqueue(self, put: Callable[[], None]) -> None:
        with self._wake:
            if self._closing:
                raise SchedulerClosed("the engine is closed")
            put()
            self._wake.notify()

    def _main(self) -> None:
        # All of it, or buffers that torch code keeps from inside inference mode could not be written outside it.
        try:
            with torch.inference_mode():
                while self._wait():
                    self._do_calls()
                    self._step()
                    self._do_chunk()
        except SchedulerClosed:
            pass  # said and told already
        finally:
            self._closing = True
            self._fail_everything()

    @property
    def _has_work(self) -> bool:
        return bool(self._calls or self._arriving or self._sequences or len(self._chunks))

    def _wait(self) -> bool:
        with self._wake:
            while not (self._closing or self._has_work):
                self._wake.wait()
        return not self._closing

    def _do_calls(self) -> None:
        until = time.monotonic() + CALL_SLICE_S
        while self._calls:
            done, function = self._calls.popleft()
            if done.set_running_or_notify_cancel():
                self._do_call(done, function)
            if self._sequences and time.monotonic() >= until:
                return

    @property
    def _is_lost(self) -> bool:
        return not (self._runner.usable() and (self._draft is None or self._draft.usable()))

    def _do_call(self, done: "Future[Any]", function: Callable[[], Any]) -> None:
        try:
            done.set_result(function())
        except Exception as error:
            if self._is_lost:
                done.set_exception(SchedulerClosed(LOST))
                self._end(error)
            done.set_exception(error)

    def _end(self, error: Exception) -> None:
        """Let this thread end, and with it the engine's process: whatever is open fails as closed, and can be asked
        for again from the next process. Raises SchedulerClosed."""
        log.critical("%s", LOST, exc_info=error)
        raise SchedulerClosed(LOST) from error

    def _step(self) -> None:
        while self._arriving:
            self._sequences.append(self._arriving.popleft())
        for sequence in [s for s in self._sequences if s.cancelled]:
            self._finish(sequence, "cancelled")
        began = time.monotonic()
        parts = self._compose()
        if not parts:
            return
        started = time.monotonic()
        try:
            logits = self._runner.forward([part.rows for part in parts])
        except Exception as error:
            if self._is_lost:
                self._end(error)
            log.exception("a step of %d sequences failed", len(parts))
            for part in parts:
                self._fail(part.sequence, error)
            return
        self.counters.steps += 1
        self._measure(parts, time.monotonic() - started)
        with one_wake():
            for part, rows in zip(parts, logits, strict=True):
                self._advance(part, rows)
        self._stepped_at = time.monotonic()
        self._step_s = self._stepped_at - began

    def _compose(self) -> list[Part]:
        try:
            return compose(self._sequences, self._prefill_rows, self.planner)
        except Exception as error:
            if self._is_lost:
                self._end(error)
            log.exception("guessing failed for %d answers, which go on without it", len(self._sequences))
            for sequence in self._sequences:
                sequence.guess_no_more()
            return compose(self._sequences, self._prefill_rows)

    def _measure(self, parts: Seq[Part], seconds: float) -> None:
        """Tell the planner what a step took, unless it was for prompts too."""
        if self.planner is not None and not any(part.sequence.n_left for part in parts):
            members = tuple(_name(part.rows.document) for part in parts)
            self.planner.costs.record(members, sum(len(part.rows.tokens) for part in parts), seconds)

    def _advance(self, part: Part, logits: Any) -> None:
        sequence = part.sequence
        try:
            reason = self._take(sequence, part, logits)
        except Exception as error:
            self._fail(sequence, error)
            return
        if reason is not None:
            self._finish(sequence, reason)

    def _take(self, sequence: Sequence, part: Part, logits: Any) -> str | None:
        """Account for a step of one sequence and sample what comes next; the finish reason at its end."""
        if sequence.n_left:
            sequence.n_fed += len(part.rows.tokens)
            self.counters.prefilled_tokens += len(part.rows.tokens) - int(part.rows.refeed)
            if part.canary and sequence.on_canary is not None:
                sequence.on_canary(logits[0])
            if sequence.n_left:
                return None
        if sequence.sampler is None:
            return "prefilled"
        return self._sample(sequence, sequence.sampler, part.drafts, logits[len(logits) - 1 - len(part.drafts) :])

    def _sample(self, sequence: Sequence, sampler: Sampler, drafts: Seq[int], logits: Any) -> str | None:
        """The next token of a sequence, and one more behind each draft that was sampled. Each is drawn from the logits
        that it would have been drawn from without drafts, in the same order; rows of wrong drafts leave the tail, and
        those behind the last token of an answer that ends or was cancelled."""
        reason, n_sampled, n_accepted = None, 0, 0
        for row, draft in zip(logits, [*drafts, None], strict=True):
            token_id = sampler.pick(row)
            n_sampled, n_accepted = n_sampled + 1, n_accepted + (token_id == draft)
            reason = sequence.accept(token_id)
            if reason is not None or token_id != draft or sequence.cancelled:
                break
        if n_wrong := len(drafts) + 1 - n_sampled:
            self._runner.truncate_tail(sequence.slot, self._runner.tail_length(sequence.slot) - n_wrong)
        sequence.n_steps += 1
        sequence.n_drafted += len(drafts)
        sequence.n_accepted += n_accepted
        self.counters.decoded_tokens += n_sampled
        self.counters.drafted_tokens += len(drafts)
        self.counters.accepted_tokens += n_accepted
        if self.drafting is not None and sequence.drafter is not None and sequence.drafter.is_led:
            self.drafting.counters.guessed_tokens += len(drafts)
            self.drafting.counters.accepted_tokens += n_accepted
        return reason

    def _do_chunk(self) -> None:
        with self._wake:
            if not len(self._chunks):
                return
            chunk = self._chunk = self._chunks.pop()
        self._stepped_at = time.monotonic()
        try:
            self._check_chunk()
            result = chunk.work(self._between_layers)
        except Exception as error:
            if self._is_lost:
                chunk.done.set_exception(SchedulerClosed(LOST))
                self._end(error)
            if not isinstance(error, ChunkCancelled | SchedulerClosed):
                log.exception("work on a document failed")
            chunk.done.set_exception(error)
            return
        finally:
            self._chunk = None
        counters = self.drafting.counters if chunk.is_draft and self.drafting is not None else self.counters
        counters.prefilled_tokens += chunk.n_tokens
        counters.document_prefill_tokens += chunk.n_tokens
        chunk.done.set_result(result)

    def _between_layers(self) -> None:
        self._check_chunk()
        self._do_calls()
        due = min(self._step_s * self._share / (1 - self._share), self._max_gap_s)
        if (self._sequences or self._arriving) and time.monotonic() - self._stepped_at >= due:
            self._step()

    def _check_chunk(self) -> None:
        if self._closing:
            raise SchedulerClosed("the engine is closed")
        if self._chunk is not None and self._chunk.is_cancelled():
            raise ChunkCancelled("the build was cancelled")

    def _finish(self, sequence: Sequence, reason: str) -> None:
        self._sequences.remove(sequence)
        try:
            sequence.finish(reason)
        except Exception as error:
            sequence.done.set_exception(error)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self._sequences.remove(sequence)
        sequence.done.set_exception(error)

    def _fail_everything(self) -> None:
        closed = SchedulerClosed("the engine is closed")
        with self._wake:
            for sequence in [*self._arriving, *self._sequences]:
                sequence.done.set_exception(closed)
            for done, _ in self._calls:
                done.set_exception(closed)
            while len(self._chunks):
                self._chunks.pop().done.set_exception(closed)
            self._arriving.clear()
            self._sequences.clear()
            self._calls.clear()


def _name(document: Any) -> Hashable:
    """Of a document of the runner, where steps are compared: another one may come to lie at the address of one that is
    gone, and takes as long only where it is as long."""
    return None if document is None else (id(document), document.next_position)
