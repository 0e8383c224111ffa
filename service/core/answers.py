"""Questions and their answers: each runs apart from the connection that asked, and is kept as a turn."""

import asyncio
from dataclasses import dataclass, field
from functools import partial

import structlog

from ingest.model import PageTokens
from service.core.access import usable_session
from service.core.admission import Admission, Ticket
from service.core.answer_run import ENGINE_RETRY_AFTER_S, AnswerRun, Job
from service.core.citation_indexes import CitationIndexes
from service.core.citations import Cited
from service.core.clock import Clock
from service.core.following import POLL_S, Following
from service.core.leases import Leases
from service.core.outages import KEEP_S, through_outages
from service.core.preparation import Preparation
from service.core.provenance import notice_of, whole_document
from service.core.repeats import Repeat, Repeated
from service.core.results import Outcome
from service.core.sampling import Question
from service.core.strays import Strays
from service.core.streams import AnswerStream
from service.core.turn_log import TakenOver, TurnLog, closing_of, failed_turn, taken_over
from service.db.engine import Database
from service.db.models import TurnRow
from service.engine.protocol import EngineClient, left_running
from service.errors import DatabaseUnavailable, NotFound, ServiceError, Unavailable

_STOP_S = 5.0
_ADOPTED_AT_ONCE = 32
SHARED_GRACE_S = 1.0
"""Readers at other processes are known by the database: that takes a moment."""
_log = structlog.get_logger("preread.answers")


@dataclass(slots=True)
class _Running:
    """`work` are tasks that must not be collected before they end. `n_followed`: of the row, as it was seen last."""

    job: Job
    stream: AnswerStream
    n_followed: int = 0
    work: set[asyncio.Future[None]] = field(default_factory=set)


class AnswerService:
    """Answers questions, each in a task of its own, so that its reader may leave and come back.

    An answer nobody reads for `grace_s` is cancelled. Where engines outlive this process, so do answers: others
    take them over, and this one those of others.
    """

    def __init__(
        self,
        *,
        database: Database,
        engine: EngineClient,
        preparation: Preparation,
        turns: TurnLog,
        admission: Admission,
        clock: Clock,
        grace_s: float,
        leases: Leases,
    ) -> None:
        self._database = database
        self._engine = engine
        self._preparation = preparation
        self._turns = turns
        self._admission = admission
        self._clock = clock
        self._grace_s = grace_s if leases.alone else max(grace_s, SHARED_GRACE_S)
        self._leases = leases
        self._following = Following(database, engine, self._grace_s)
        self._run = AnswerRun(engine, preparation.rebuild, clock)
        self._indexes = CitationIndexes(database)
        self._running: dict[str, _Running] = {}
        self._strays = Strays(clock, leases.lease_s)
        self._closing = False

    def start(self) -> None:
        """Take up answers of processes that are gone, now and then; and give up one's own when others do that."""
        if not self._leases.alone:
            self._leases.lost.append(self._let_go)
            self._leases.each_beat += [self._adopt_free, self._adopt_strays]

    async def ask(
        self,
        owner_id: str,
        session_id: str,
        question: Question,
        *,
        repeat_key: str | None = None,
        anywhere: Repeat | None = None,
        after: str | None = None,
    ) -> AnswerStream:
        """Start answering; the stream of the answer. The same question with the same `repeat_key` is not asked again,
        unless it failed: the stream is that of its answer. `anywhere` is such a key that is not this session's own;
        what it made is told by Repeated. `after`: the turn that must be the last one, else the session is busy.

        Raises NotFound, Forbidden, Invalid, TooLong, Conflict (``session_busy``, ``document_not_ready``,
        ``model_changed``), Busy, LimitReached, Unavailable or StorageFull; then nothing has been kept.
        """
        accepted = self._clock.monotonic()
        question.check()
        repeat = None if repeat_key is None else Repeat(f"ask:{session_id}", owner_id, repeat_key, repr(question))
        await self._preparation.require_ready(owner_id, session_id)
        if repeat is not None and (answer_id := await self._turns.answered(session_id, repeat)) is not None:
            return await self.stream(owner_id, session_id, answer_id)
        if self._closing or not self._engine.alive:
            raise Unavailable("The engine is not running: try again.", retry_after_s=ENGINE_RETRY_AFTER_S)
        ticket = self._admission.enter(session_id)
        try:
            job = await self._preparation.job(owner_id, session_id, question, accepted, after)
            await self._turns.begin(job, anywhere or repeat)
        except Repeated as again:
            ticket.leave()
            if anywhere is not None:
                raise
            return await self.stream(owner_id, session_id, again.target)
        except BaseException:
            ticket.leave()
            raise
        return self._start(job, ticket)

    async def stream(self, owner_id: str, session_id: str, answer_id: str) -> AnswerStream:
        """The stream of a running answer, or that of one that is over, from its row. Raises NotFound."""
        async with self._database.reading() as uow:
            await usable_session(uow, owner_id, session_id, self._clock.now())
            running = self._running.get(answer_id)
            if running is not None and running.job.session_id == session_id:
                return running.stream
            turn = await uow.turns.get(session_id, answer_id)
        if turn is None:
            raise NotFound("There is no such answer in this session.")
        if turn.status == "running" and not self._leases.alone:
            return self._following.stream(turn)
        return AnswerStream.finished(answer_id, session_id, turn.answer, closing_of(turn))

    async def stop(self, session_id: str) -> None:
        """Cancel the session's running answer, if it has one, and wait a few seconds for its end."""
        await self._cancel_and_wait([r for r in self._running.values() if r.job.session_id == session_id], _STOP_S)
        if not self._leases.alone:
            await self._stop_elsewhere(session_id)

    async def close(self, timeout_s: float = _STOP_S) -> None:
        """Refuse further questions, and cancel what runs until its turns are stored; or leave it to other processes."""
        self._closing = True
        await self._following.close()
        if self._leases.alone or not self._outlives:
            await self._cancel_and_wait(list(self._running.values()), timeout_s)
        await self._let_go()

    @property
    def _outlives(self) -> bool:
        """Whether answers can go on without this process."""
        return hasattr(self._engine, "attach")

    def forget_document(self, document_id: str) -> None:
        """Drop what memory holds of a document's text."""
        self._indexes.forget(document_id)

    @property
    def running(self) -> int:
        """Answers that run or wait."""
        return len(self._running)

    async def _let_go(self) -> None:
        """End the tasks of what runs here. Nothing is written: rows stay for whoever takes them up."""
        tasks = {task for running in self._running.values() for task in running.work}
        if not self._leases.alone:
            for running in self._running.values():
                running.stream.fail(taken_over())
        with left_running(self._engine):
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_STOP_S)

    async def _adopt_free(self) -> None:
        async with self._database.reading() as uow:
            free = await uow.turns.free(limit=_ADOPTED_AT_ONCE)
        for turn, owner_id in free:
            if turn.id in self._running or self._closing:
                continue
            async with self._database.writing(alone=False) as uow:
                claimed = await uow.turns.claim(turn.id, self._leases.owner)
            if claimed:
                await self._adopt(turn, owner_id)

    async def _adopt_strays(self) -> None:
        async with self._database.reading() as uow:
            mine = {turn.id: (turn, owner_id) for turn, owner_id in await uow.turns.carried_by(self._leases.owner)}
        for answer_id in self._strays.due(mine.keys() - self._running.keys()):
            if not self._closing:
                await self._adopt(*mine[answer_id])

    async def _adopt(self, turn: TurnRow, owner_id: str) -> None:
        _log.info("answer taken over", answer_id=turn.id)
        try:
            job = await self._preparation.adopted(owner_id, turn, self._leases.owner)
        except ServiceError as error:
            _log.warning("an answer cannot be taken over", answer_id=turn.id, code=error.code)
            await self._turns.fail(turn, self._leases.owner)
            return
        self._start(job, self._admission.take_over(turn.session_id))

    async def _stop_elsewhere(self, session_id: str) -> None:
        """Have other processes' answers of a session end."""
        deadline = self._clock.monotonic() + _STOP_S
        while True:
            async with self._database.reading() as uow:
                answer_ids = await uow.turns.running_of(session_id)
            if not answer_ids or self._clock.monotonic() >= deadline:
                return
            for answer_id in answer_ids:
                await self._engine.cancel(answer_id)
            await asyncio.sleep(POLL_S)

    def _start(self, job: Job, ticket: Ticket) -> AnswerStream:
        stream = AnswerStream(
            job.answer_id, job.session_id, grace_s=self._grace_s, on_abandoned=lambda: self._abandon(running)
        )
        running = _Running(job, stream)
        self._running[job.answer_id] = running
        running.work.add(asyncio.create_task(self._answer(job, stream, ticket), name=job.answer_id))
        return stream

    async def _answer(self, job: Job, stream: AnswerStream, ticket: Ticket) -> None:
        turn = failed_turn(job)
        try:
            turn = await self._run_and_keep(job, stream)
        except TakenOver as error:
            stream.fail(error)
        except Exception as error:
            _log.error("answer failed", answer_id=job.answer_id, exc_info=error)
            turn = failed_turn(job, "internal_error", "The server failed; its log says why.")
        finally:
            # The place is free before the last event is out: whoever reads `done` may ask the next question.
            ticket.leave(self._clock.monotonic() - job.accepted)
            del self._running[job.answer_id]
            turn.answer = stream.text
            stream.close(closing_of(turn))

    async def _run_and_keep(self, job: Job, stream: AnswerStream) -> TurnRow:
        outcome = await self._run.run(job, stream.add_text)
        if outcome.text and outcome.error is None:
            outcome.cited = await self._cite(job, outcome)
        if outcome.started is not None:
            await through_outages(lambda: self._account(job, outcome), within_s=KEEP_S)
        _log.info("answer over", answer_id=job.answer_id, status=outcome.status, total_ms=round(outcome.total_ms))
        return await self._turns.finish(job, outcome, within_s=KEEP_S)

    async def _cite(self, job: Job, outcome: Outcome) -> Cited:
        try:
            document_ids = [document.id for document in job.context.documents]
            looks = outcome.done.looks if outcome.done is not None else []
            cite = partial(self._indexes.cite, document_ids, job.question.text, outcome.text, looks)
            return await through_outages(cite, within_s=KEEP_S)
        except Exception as error:  # an answer without citations is better than none
            _log.error("citing failed", answer_id=job.answer_id, exc_info=error)
            return Cited()

    async def _account(self, job: Job, outcome: Outcome) -> None:
        """Say which pages the answer stands on."""
        context = job.context
        if not context.together and not context.policy.is_windowed:
            document = context.document
            outcome.provenance = [whole_document(document.id, document.page_count or 1)]
            return
        pages: list[list[PageTokens]] = []
        async with self._database.reading() as uow:
            for document in context.documents:
                pages.append([PageTokens(*page) for page in await uow.pages.ranges(document.id)])
        readings = context.readings(pages, outcome.spans)
        outcome.provenance = [part for reading in readings for part in reading.provenance()]
        if outcome.text:
            outcome.notice = notice_of(readings, [(each.document_id, each.page) for each in outcome.cited.citations])

    def _abandon(self, running: _Running) -> None:
        running.work.add(asyncio.ensure_future(self._cancel_unless_followed(running)))

    async def _cancel_unless_followed(self, running: _Running) -> None:
        if not self._leases.alone and await self._is_followed(running):
            running.stream.wait_on()
            return
        _log.info("answer abandoned", answer_id=running.job.answer_id)
        await self._cancel(running)

    async def _is_followed(self, running: _Running) -> bool:
        """Whether somebody has read it at another process since this was asked last."""
        try:
            async with self._database.reading() as uow:
                n = await uow.turns.followed(running.job.answer_id)
        except DatabaseUnavailable:
            return True  # nobody can say so now
        before, running.n_followed = running.n_followed, n
        return n != before

    async def _cancel(self, running: _Running) -> None:
        running.job.cancelled.set()
        await self._engine.cancel(running.job.answer_id)

    async def _cancel_and_wait(self, answers: list[_Running], timeout_s: float) -> None:
        await asyncio.gather(*(self._cancel(running) for running in answers), return_exceptions=True)
        tasks = {task for running in answers for task in running.work}
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
