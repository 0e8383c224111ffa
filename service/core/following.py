"""Answers that other processes carry, for readers who come here: events through the fleet, the end by the row."""

import asyncio
from contextlib import suppress

import structlog

from service.core.outages import through_outages
from service.core.streams import AnswerStream
from service.core.turn_log import closing_of, taken_over
from service.db.engine import Database
from service.db.models import TurnRow
from service.engine.messages import AnswerDone, AnswerText
from service.engine.protocol import EngineClient, attached
from service.errors import NotFound

POLL_S = 0.2
_log = structlog.get_logger("preread.following")


class Following:
    """One stream per answer, however many read it; it is left when nobody does any more.

    While somebody reads, the process that carries the answer is told so by the row, and does not cancel it.
    """

    def __init__(self, database: Database, engine: EngineClient, grace_s: float) -> None:
        self._database = database
        self._engine = engine
        self._grace_s = grace_s
        self._streams: dict[str, AnswerStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def stream(self, turn: TurnRow) -> AnswerStream:
        """Of an answer whose row says that it runs."""
        if (known := self._streams.get(turn.id)) is not None:
            return known
        stream = AnswerStream(
            turn.id, turn.session_id, grace_s=self._grace_s, on_abandoned=lambda: self._leave(turn.id)
        )
        self._streams[turn.id] = stream
        task = asyncio.create_task(self._follow(stream), name=f"follow {turn.id}")
        self._tasks[turn.id] = task
        task.add_done_callback(lambda done: self._drop(turn.id, done))
        return stream

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _leave(self, answer_id: str) -> None:
        self._tasks[answer_id].cancel()

    def _drop(self, answer_id: str, task: asyncio.Task[None]) -> None:
        stream = self._streams.pop(answer_id)
        del self._tasks[answer_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("an answer could not be followed", answer_id=answer_id, exc_info=error)
        if not stream.closed:  # nobody reads it, or whoever does comes back
            stream.fail(taken_over())

    async def _follow(self, stream: AnswerStream) -> None:
        telling = asyncio.create_task(self._tell(stream.answer_id))
        try:
            is_complete = False
            while (turn := await self._ended(stream)) is None:
                # Not there yet, missed and asked once more, or lost: then the row will say so.
                is_complete = is_complete or await self._relay(stream)
                await asyncio.sleep(POLL_S)
        finally:
            telling.cancel()
        stream.add_text(turn.answer[len(stream.text) :])
        turn.answer = stream.text
        stream.close(closing_of(turn))

    async def _relay(self, stream: AnswerStream) -> bool:
        """Add what is new of the engine's events; whether they came to their end."""
        events, n_chars = attached(self._engine, stream.answer_id), 0
        if events is None:
            return False
        async for event in events:
            if isinstance(event, AnswerText):
                n_new = n_chars + len(event.text) - len(stream.text)
                n_chars += len(event.text)
                if n_new > 0:
                    stream.add_text(event.text[-n_new:])
            elif isinstance(event, AnswerDone):
                return True
        return False

    async def _ended(self, stream: AnswerStream) -> TurnRow | None:
        """The row, once it is not running any more; one of a failure when it is gone."""
        turn = await through_outages(lambda: self._row(stream))
        if turn is None:
            gone = NotFound("The session or its document was deleted meanwhile.")
            failed = {"status": "failed", "error_code": gone.code, "error_detail": gone.detail}
            return TurnRow(id=stream.answer_id, answer="", **failed)
        return turn if turn.status != "running" else None

    async def _row(self, stream: AnswerStream) -> TurnRow | None:
        async with self._database.reading() as uow:
            return await uow.turns.get(stream.session_id, stream.answer_id)

    async def _tell(self, answer_id: str) -> None:
        """Say that somebody reads, often enough to be seen within the grace time."""
        while True:
            with suppress(Exception):  # the next time is as good
                async with self._database.writing(alone=False) as uow:
                    await uow.turns.follow(answer_id)
            await asyncio.sleep(self._grace_s / 4)
