"""Responses that were asked to be stored: shown again, gone on from, deleted."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from service.core.access import usable_session
from service.core.chats.dialogue import Exchange
from service.core.clock import Clock
from service.core.sessions import SessionService
from service.core.streams import AnswerStream
from service.db.chats import ResponseRow
from service.db.engine import Database
from service.db.models import SessionRow, TurnRow
from service.db.repositories import UnitOfWork
from service.errors import Conflict, NotFound

_MISSING = "There is no such response."


@dataclass(frozen=True, slots=True)
class Previous:
    """What a response followed, and itself."""

    document_ids: list[str]
    exchanges: Sequence[Exchange]


class StoredResponses:
    """Each is a turn of a session, with what its request was."""

    def __init__(self, db: Database, sessions: SessionService, clock: Clock) -> None:
        self._db = db
        self._sessions = sessions
        self._clock = clock

    async def keep(self, owner_id: str, answer: AnswerStream, request: dict[str, Any]) -> None:
        """Store what was asked for; what came of it the turn has. A second time is nothing, nor when the session was
        deleted meanwhile."""
        async with self._db.writing() as uow:
            is_there = await uow.sessions.get(answer.session_id, owner_id) is not None
            if is_there and await uow.chats.response(owner_id, answer.answer_id) is None:
                row = ResponseRow(id=answer.answer_id, owner_id=owner_id, session_id=answer.session_id)
                row.request, row.created_at = request, self._clock.now()
                await uow.chats.add(row)

    async def get(self, owner_id: str, answer_id: str) -> tuple[ResponseRow, TurnRow]:
        """Raises NotFound."""
        async with self._db.reading() as uow:
            row, _, turns = await self._reached(uow, owner_id, answer_id)
        return row, turns[-1]

    async def previous(self, owner_id: str, answer_id: str) -> Previous:
        """Raises NotFound (``previous_response_not_found``), Conflict for one that is not over, or failed."""
        try:
            async with self._db.reading() as uow:
                _, session, turns = await self._reached(uow, owner_id, answer_id)
        except NotFound:
            raise NotFound(
                "There is no such previous response: it was not stored, was deleted, or is not yours.",
                code="previous_response_not_found",
                param="previous_response_id",
            ) from None
        if turns[-1].status not in ("done", "cancelled"):
            raise Conflict(
                f"The previous response is {turns[-1].status}: it cannot be gone on from.", param="previous_response_id"
            )
        exchanges = [Exchange(turn.question, turn.answer) for turn in turns if _is_said(turn)]
        return Previous(session.document_ids, exchanges)

    async def delete(self, owner_id: str, answer_id: str) -> None:
        """Remove a response, and the session once it was the last one of it. Raises NotFound."""
        async with self._db.writing() as uow:
            row, session, _ = await self._reached(uow, owner_id, answer_id)
            others = await uow.chats.remove_response(row)
        if not others and session.origin:
            with suppress(NotFound):
                await self._sessions.delete(owner_id, session.id)

    async def _reached(
        self, uow: UnitOfWork, owner_id: str, answer_id: str
    ) -> tuple[ResponseRow, SessionRow, Sequence[TurnRow]]:
        """A response, its session, and its turns through that of the response."""
        row = await uow.chats.response(owner_id, answer_id)
        if row is None:
            raise NotFound(_MISSING)
        try:
            session, _ = await usable_session(uow, owner_id, row.session_id, self._clock.now())
        except NotFound:
            raise NotFound(_MISSING) from None
        turns = await uow.turns.of_session(session.id)
        at = next((n for n, turn in enumerate(turns, 1) if turn.id == row.id), 0)
        if not at:
            raise NotFound(_MISSING)
        return row, session, turns[:at]


def _is_said(turn: TurnRow) -> bool:
    return turn.status == "done" or (turn.status == "cancelled" and turn.kv_id is not None)
