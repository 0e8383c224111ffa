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
from service.core.citations import Citation
from service.core.clock import Clock
from service.core.outages import KEEP_S, through_outages
from service.core.preparation import Preparation
from service.core.provenance import notice_of, whole_document
from service.core.results import Outcome
from service.core.sampling import Question
from service.core.streams import AnswerStream
from service.core.turn_log import TurnLog, closing_of, failed_turn
from service.db.engine import Database
from service.db.models import TurnRow
from service.engine.protocol import EngineClient
from service.errors import NotFound, Unavailable

_STOP_S = 5.0
_log = structlog.get_logger("preread.answers")


@dataclass(slots=True)
class _Running:
    """`work` are tasks that must not be collected before they end."""

    job: Job
    stream: AnswerStream
    work: set[asyncio.Future[None]] = field(default_factory=set)


class AnswerService:
    """Answers questions, each in a task of its own, so that its reader may leave and come back.

    An answer nobody reads for `grace_s` is cancelled.
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
    ) -> None:
        self._database = database
        self._engine = engine
        self._preparation = preparation
        self._turns = turns
        self._admission = admission
        self._clock = clock
        self._grace_s = grace_s
        self._run = AnswerRun(engine, preparation.rebuild, clock)
        self._indexes = CitationIndexes(database)
        self._running: dict[str, _Running] = {}
        self._closing = False

    async def recover(self) -> int:
        """At a server's start: turns that a crash left running are failed. How many there were."""
        return await self._turns.recover()

    async def ask(self, owner_id: str, session_id: str, question: Question) -> AnswerStream:
        """Start answering; the stream of the answer.

        Raises NotFound, Invalid, TooLong, Conflict (``session_busy``, ``document_not_ready``,
        ``model_changed``), Busy, Unavailable or StorageFull; then nothing has been kept.
        """
        accepted = self._clock.monotonic()
        question.check()
        await self._preparation.require_ready(owner_id, session_id)
        if self._closing or not self._engine.alive:
            raise Unavailable("The engine is not running: try again.", retry_after_s=ENGINE_RETRY_AFTER_S)
        ticket = self._admission.enter(session_id)
        try:
            job = await self._preparation.job(owner_id, session_id, question, accepted)
            await self._turns.begin(job)
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
        return AnswerStream.finished(answer_id, session_id, turn.answer, closing_of(turn))

    async def stop(self, session_id: str) -> None:
        """Cancel the session's running answer, if it has one, and wait a few seconds for its end."""
        await self._cancel_and_wait([r for r in self._running.values() if r.job.session_id == session_id], _STOP_S)

    async def close(self, timeout_s: float = _STOP_S) -> None:
        """Refuse further questions, cancel what runs, and wait until its turns are stored."""
        self._closing = True
        await self._cancel_and_wait(list(self._running.values()), timeout_s)
        for running in self._running.values():
            for task in running.work:
                task.cancel()

    def forget_document(self, document_id: str) -> None:
        """Drop what memory holds of a document's text."""
        self._indexes.forget(document_id)

    @property
    def running(self) -> int:
        """Answers that run or wait."""
        return len(self._running)

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
            outcome.citations = await self._cite(job, outcome)
        if outcome.started is not None:
            await through_outages(lambda: self._account(job, outcome), within_s=KEEP_S)
        _log.info("answer over", answer_id=job.answer_id, status=outcome.status, total_ms=round(outcome.total_ms))
        return await self._turns.finish(job, outcome, within_s=KEEP_S)

    async def _cite(self, job: Job, outcome: Outcome) -> list[Citation]:
        try:
            document_ids = [document.id for document in job.context.documents]
            cite = partial(self._indexes.cite, document_ids, job.question.text, outcome.text)
            return await through_outages(cite, within_s=KEEP_S)
        except Exception as error:  # an answer without citations is better than none
            _log.error("citing failed", answer_id=job.answer_id, exc_info=error)
            return []

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
            outcome.notice = notice_of(readings, [(each.document_id, each.page) for each in outcome.citations])

    def _abandon(self, running: _Running) -> None:
        _log.info("answer abandoned", answer_id=running.job.answer_id)
        running.work.add(asyncio.ensure_future(self._cancel(running)))

    async def _cancel(self, running: _Running) -> None:
        running.job.cancelled.set()
        await self._engine.cancel(running.job.answer_id)

    async def _cancel_and_wait(self, answers: list[_Running], timeout_s: float) -> None:
        await asyncio.gather(*(self._cancel(running) for running in answers), return_exceptions=True)
        tasks = {task for running in answers for task in running.work}
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
