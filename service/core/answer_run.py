"""One answer, from the engine's first event to its outcome."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from service.core.clock import Clock
from service.core.context import Context
from service.core.results import Outcome, Rebuilt
from service.core.sampling import Question
from service.engine.messages import (
    AnswerDone,
    AnswerEvent,
    AnswerRequest,
    AnswerStarted,
    AnswerText,
    BuildDone,
    DocumentRef,
    Failed,
    Sampling,
)
from service.engine.protocol import EngineClient, attached
from service.errors import Busy, NotFound, ServiceError, StorageFull, TooLong, Unavailable

ENGINE_RETRY_AFTER_S = 5
_ENDED_EARLY = Failed("engine_lost", "The engine ended the answer without a word.", retryable=True)

_LOST_DETAIL = "The engine stopped while this was being answered and is being restarted: ask again."
_UNKNOWN_DETAIL = "The server that carried this answer was lost, and what it had sent is not known: ask again."
_MISS_DETAIL = "The document's snapshot was lost again right after it had been rebuilt: ask again."

Rebuild = Callable[[Context, str], Awaitable[tuple[Context, BuildDone]]]
"""Brings back the snapshot of one of the documents, by its id; the context as it is then, and what it took."""
OnText = Callable[[str], None]


def error_of(code: str, detail: str) -> ServiceError:
    """The error a client is told, by the code of an engine's `Failed` or of a stored turn."""
    match code:
        case "engine_lost":
            return Unavailable(_LOST_DETAIL, retry_after_s=ENGINE_RETRY_AFTER_S, code=code)
        case "snapshot_miss":
            return Unavailable(_MISS_DETAIL, retry_after_s=ENGINE_RETRY_AFTER_S, code=code)
        case "unknown_request":
            return Unavailable(_UNKNOWN_DETAIL, retry_after_s=ENGINE_RETRY_AFTER_S, code="interrupted")
        case "interrupted" | "database_unavailable":
            return Unavailable(detail, retry_after_s=ENGINE_RETRY_AFTER_S, code=code)
        case "busy" | "queue_full":
            return Busy(detail)
        case "too_long" | "context_length_exceeded":
            return TooLong(detail)
        case "storage" | "storage_full":
            return StorageFull(detail)
        case "internal":
            return ServiceError("The engine failed; its log says why.", code="internal_error")
        case "not_found":
            return NotFound(detail)
        case _:
            return ServiceError(detail, code=code)


@dataclass(slots=True)
class Job:
    """An admitted answer. `accepted` is the monotonic time at which its question came in, `lease` the process that
    carries it. `adopted`: another process began it, and its events are taken up."""

    answer_id: str
    owner_id: str
    session_id: str
    question: Question
    prompt_digest: str
    context: Context
    prompt_ids: list[int]
    sampling: Sampling
    accepted: float
    lease: str = ""
    adopted: bool = False
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def parameters(self) -> dict[str, Any]:
        """What the turn's row keeps of how it was asked."""
        return self.question.parameters(self.sampling.max_tokens) | {"prompt": self.prompt_digest}

    def request(self) -> AnswerRequest:
        document, together = self.context.document, self.context.together
        return AnswerRequest(
            request_id=self.answer_id,
            session_id=self.session_id,
            document=DocumentRef(document.owner_id, document.id),
            token_digest="" if together else document.token_digest or "",
            n_document_tokens=self.context.n_document_tokens,
            turns=self.context.turns,
            prompt_ids=self.prompt_ids,
            sampling=self.sampling,
            kv_id=self.answer_id,
            pinned=any(row.pinned for row in self.context.documents),
            retention=None if together else self.context.policy.retention,
            parts=together.parts if together else [],
            fetch_tokens=together.fetch_tokens if together else 0,
        )


class AnswerRun:
    """Runs a job: asks the engine, and once more after each rebuild of a snapshot that was missing."""

    def __init__(self, engine: EngineClient, rebuild: Rebuild, clock: Clock) -> None:
        self._engine = engine
        self._rebuild = rebuild
        self._clock = clock

    async def run(self, job: Job, on_text: OnText) -> Outcome:
        """`on_text` gets each piece of the answer as it comes. Never raises for a fault of the engine or of
        a rebuild: the outcome has it."""
        outcome = Outcome()
        try:
            failed = await self._attempt(job, outcome, on_text)
            mended: set[str | None] = set()
            while failed is not None and failed.code == "snapshot_miss":
                missing = failed.document_id if job.context.together else job.context.document.id
                if missing in mended:
                    break
                mended.add(missing)
                failed = await self._after_rebuild(job, outcome, failed, missing, on_text)
            if failed is not None and failed.code == "cancelled":
                outcome.cancelled = True
            elif failed is not None:
                outcome.error = error_of(failed.code, failed.detail)
        except ServiceError as error:
            outcome.error = error
        outcome.total_ms = self._since(job)
        return outcome

    async def _attempt(self, job: Job, outcome: Outcome, on_text: OnText) -> Failed | None:
        """One pass through the engine; how it failed, or None when it ended in order."""
        if job.cancelled.is_set():
            return Failed("cancelled", "Nobody waited for this answer.")
        if (events := self._events(job)) is None:
            return Failed("engine_lost", "The engine is restarting: ask again.", retryable=True)
        async for event in events:
            match event:
                case AnswerStarted():
                    outcome.started = event
                    outcome.queue_ms = event.queue_ms
                case AnswerText():
                    if outcome.ttft_ms is None:
                        outcome.ttft_ms = self._since(job)
                    outcome.text += event.text
                    on_text(event.text)
                case AnswerDone():
                    outcome.done = event
                    return None
                case Failed():
                    return event
        return _ENDED_EARLY

    def _events(self, job: Job) -> AsyncIterator[AnswerEvent] | None:
        """Of a new attempt, or of the one that another process began. None: there is no engine."""
        if job.adopted:
            job.adopted = False  # after a miss it is asked from here
            return attached(self._engine, job.answer_id) or _unknown()
        return self._engine.answer(job.request()) if self._engine.alive else None

    async def _after_rebuild(
        self, job: Job, outcome: Outcome, miss: Failed, missing: str | None, on_text: OnText
    ) -> Failed | None:
        """`missing` None: what was missing is no document's own, and is made anew by the next attempt."""
        began, n_computed = self._clock.monotonic(), 0
        if missing is not None:
            rebuilt = await self._rebuild_or_cancel(job, missing)
            if rebuilt is None:
                return Failed("cancelled", "Nobody waited for this answer.")
            job.context, n_computed = rebuilt[0], rebuilt[1].prefilled_tokens
        before = outcome.rebuilt or Rebuilt(miss.miss_reason or "absent", 0, 0.0)
        ms = (self._clock.monotonic() - began) * 1e3
        outcome.rebuilt = Rebuilt(before.miss_reason, before.n_tokens + n_computed, before.ms + ms)
        return await self._attempt(job, outcome, on_text)

    async def _rebuild_or_cancel(self, job: Job, document_id: str) -> tuple[Context, BuildDone] | None:
        """The context with the rebuilt document and its build, or None when the job was cancelled first; the rebuild
        goes on for others then."""
        rebuild = asyncio.ensure_future(self._rebuild(job.context, document_id))
        cancelled = asyncio.ensure_future(job.cancelled.wait())
        try:
            await asyncio.wait({rebuild, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            if rebuild.done():
                return rebuild.result()
            rebuild.add_done_callback(_consume)
            return None
        finally:
            cancelled.cancel()

    def _since(self, job: Job) -> float:
        return (self._clock.monotonic() - job.accepted) * 1e3


async def _unknown() -> AsyncIterator[AnswerEvent]:
    yield Failed("unknown_request", "it ran in an engine of the process that is gone", retryable=True)


def _consume(task: "asyncio.Future[Any]") -> None:
    with suppress(asyncio.CancelledError):
        task.exception()
