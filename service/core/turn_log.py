"""What is written of a turn: once when it begins, once when it ends."""

from service.core.admission import SESSION_BUSY
from service.core.answer_run import Job, error_of
from service.core.audit import record
from service.core.clock import Clock
from service.core.context import pack_ids, pack_spans
from service.core.leases import Leases
from service.core.outages import through_outages
from service.core.quotas import Quotas, count_tokens
from service.core.repeats import Repeat, Repeated
from service.core.results import Outcome, columns_of, result_of
from service.core.streams import StreamEvent, closing_events
from service.core.turn_kv import TurnKV
from service.db.engine import Database
from service.db.models import TurnRow
from service.db.repositories import UnitOfWork
from service.errors import Conflict, DatabaseUnavailable, NotFound, ServiceError, StorageFull, Unavailable

INTERRUPTED = "interrupted"
INTERRUPTED_DETAIL = "The server stopped while this question was being answered: ask it again."


class TakenOver(Unavailable):
    """Another process has the answer now."""

    code = "taken_over"


class TurnLog:
    """Rows of turns over the life of an answer. Each write is one transaction."""

    def __init__(
        self, database: Database, turn_kv: TurnKV, clock: Clock, leases: Leases, quotas: Quotas | None = None
    ) -> None:
        self._database = database
        self._quotas = quotas or Quotas()
        self._turn_kv = turn_kv
        self._clock = clock
        self._leases = leases

    async def recover(self) -> int:
        """Turns that a crash left `running` are failed, unless other processes may carry them. How many there were."""
        if not self._leases.alone:
            return 0
        async with self._database.writing() as uow:
            return await uow.turns.fail_running(INTERRUPTED, INTERRUPTED_DETAIL)

    async def answered(self, session_id: str, repeat: Repeat) -> str | None:
        """The answer that a request has begun before, unless it failed. Raises Invalid for another request's key."""
        async with self._database.reading() as uow:
            return await _answered(uow, session_id, repeat)

    async def begin(self, job: Job, repeat: Repeat | None = None) -> None:
        """Add the turn as `running`. Raises NotFound when the session is gone, StorageFull, LimitReached, Conflict when
        another process answers in it, and Repeated when the same request has begun another answer meanwhile."""
        await self._leases.require()
        now, job.lease = self._clock.now(), self._leases.owner
        async with self._database.writing() as uow:
            if await uow.sessions.get(job.session_id, job.owner_id) is None:
                raise NotFound("There is no such session.")
            if not self._leases.alone and await uow.turns.is_running_elsewhere(job.session_id, job.lease):
                raise Conflict(SESSION_BUSY, code="session_busy")
            if repeat is not None:
                if (answer_id := await _answered(uow, job.session_id, repeat)) is not None:
                    raise Repeated(answer_id)
                await repeat.keep(uow, job.answer_id, now)
            # One left over in this session was not stored at its end, when the disk was full. It counts for no quota.
            await uow.turns.fail_running(INTERRUPTED, INTERRUPTED_DETAIL, session_id=job.session_id)
            await self._quotas.check_question(uow, job.owner_id, now)
            await uow.turns.add(
                TurnRow(
                    id=job.answer_id,
                    session_id=job.session_id,
                    ordinal=await uow.turns.next_ordinal(job.session_id),
                    question=job.question.text,
                    kv_id=job.answer_id,
                    parameters=job.parameters(),
                    lease_owner=job.lease,
                    created_at=now,
                )
            )
            await uow.sessions.touch(job.session_id, now)
            await record(uow, now, job.owner_id, "ask", job.answer_id, job.session_id)

    async def fail(self, turn: TurnRow, lease: str) -> None:
        """End a turn of another process that nobody can go on with."""
        ended = {"status": "failed", "error_code": INTERRUPTED, "error_detail": INTERRUPTED_DETAIL, "kv_id": None}
        async with self._database.writing(alone=False) as uow:
            await uow.turns.finish(turn.id, held_by=lease, **ended)

    async def finish(self, job: Job, outcome: Outcome, *, within_s: float = 0.0) -> TurnRow:
        """Write the end of the turn, and give it back as it now is. A database that is away is waited for.

        When it cannot be kept (disk full, no database, session deleted meanwhile) it is a failed turn that says so, and
        its KV is removed: the next question builds on what was there before. Raises TakenOver.
        """
        turn = TurnRow(id=job.answer_id, **columns_of(outcome, job.context.n_document_tokens))
        try:
            if await through_outages(lambda: self._write(job, outcome), within_s=within_s):
                return turn
            row = await self._row(job)
            if row is not None and (row.status, row.answer) == (turn.status, turn.answer):
                return turn  # kept before, and the database went away when it was to say so
            if row is not None:
                raise taken_over()
            error: ServiceError = NotFound("The session or its document was deleted meanwhile.")
        except (StorageFull, DatabaseUnavailable) as refused:
            error = refused
        await self._turn_kv.delete(job.context.document.owner_id, [job.answer_id])
        turn.status, turn.error_code, turn.error_detail = "failed", error.code, error.detail
        return turn

    async def _write(self, job: Job, outcome: Outcome) -> bool:
        values = columns_of(outcome, job.context.n_document_tokens)
        done = outcome.done
        if done is not None and done.token_ids:
            values |= {"token_ids": pack_ids(done.token_ids), "pending_ids": pack_ids(done.pending_ids)}
            values |= {"spans": pack_spans(outcome.spans)}
        else:
            values |= {"kv_id": None}
        n_computed = values["usage"].get("prefilled_tokens", 0) + values["usage"].get("completion_tokens", 0)
        async with self._database.writing() as uow:
            now = self._clock.now()
            if not await uow.turns.finish(job.answer_id, held_by=job.lease, **values):
                return False
            await uow.sessions.touch(job.session_id, now)
            await count_tokens(uow, job.owner_id, n_computed, now)
            return True

    async def _row(self, job: Job) -> TurnRow | None:
        async with self._database.reading() as uow:
            return await uow.turns.get(job.session_id, job.answer_id)


async def _answered(uow: UnitOfWork, session_id: str, repeat: Repeat) -> str | None:
    turn = await repeat.answer(uow, session_id)
    return turn.id if turn is not None else None


def taken_over() -> TakenOver:
    return TakenOver("Another server carries this answer now: take the stream up again.")


def failed_turn(job: Job, code: str = INTERRUPTED, detail: str = INTERRUPTED_DETAIL) -> TurnRow:
    """A turn whose end could not even be written."""
    return TurnRow(id=job.answer_id, answer="", status="failed", error_code=code, error_detail=detail)


def closing_of(turn: TurnRow) -> list[StreamEvent]:
    """The events after the text of a turn. One that is not over, and runs nowhere, was interrupted."""
    if turn.status in ("done", "cancelled"):
        result = result_of(turn)
        return closing_events(turn.answer, result["citations"], "done", result)
    code, detail = turn.error_code or INTERRUPTED, turn.error_detail or INTERRUPTED_DETAIL
    return closing_events(turn.answer, [], "error", error_of(code, detail))
