"""Turns of sessions: questions, answers, and which KV they left."""

from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import CursorResult, and_, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import undefer

from service.db.models import DocumentRow, SessionRow, TurnRow

_IN_CONTEXT = or_(TurnRow.status == "done", and_(TurnRow.status == "cancelled", TurnRow.kv_id.is_not(None)))


class Turns:
    """Rows of `turns`. Callers have checked that the session is the owner's."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, row: TurnRow) -> None:
        self._session.add(row)
        await self._session.flush()

    async def get(self, session_id: str, answer_id: str) -> TurnRow | None:
        query = select(TurnRow).where(TurnRow.id == answer_id, TurnRow.session_id == session_id)
        return await self._session.scalar(query)

    async def of_session(self, session_id: str) -> Sequence[TurnRow]:
        """Every turn in order, without its token ids."""
        query = select(TurnRow).where(TurnRow.session_id == session_id).order_by(TurnRow.ordinal)
        return (await self._session.scalars(query)).all()

    async def context(self, session_id: str) -> Sequence[TurnRow]:
        """The turns a next question builds on, in order, with their token ids: those done, and those
        cancelled that left KV."""
        query = (
            select(TurnRow)
            .where(TurnRow.session_id == session_id, _IN_CONTEXT)
            .order_by(TurnRow.ordinal)
            .options(undefer(TurnRow.token_ids), undefer(TurnRow.pending_ids))
        )
        return (await self._session.scalars(query)).all()

    async def next_ordinal(self, session_id: str) -> int:
        query = select(func.coalesce(func.max(TurnRow.ordinal), 0)).where(TurnRow.session_id == session_id)
        return (await self._session.scalar(query) or 0) + 1

    async def finish(self, answer_id: str, **values: Any) -> bool:
        """Set the columns of a turn that ended. False when the turn was removed meanwhile."""
        query = update(TurnRow).where(TurnRow.id == answer_id).values(**values)
        return await self._changed(query) == 1

    async def fail_running(self, code: str, detail: str, *, session_id: str | None = None) -> int:
        """Mark turns as failed that are `running` in the table but nowhere else; how many there were."""
        query = update(TurnRow).where(TurnRow.status == "running")
        if session_id is not None:
            query = query.where(TurnRow.session_id == session_id)
        return await self._changed(query.values(status="failed", error_code=code, error_detail=detail, kv_id=None))

    async def unshared_kv(self, session_id: str) -> list[str]:
        """Ids of stored KV that only this session's turns use."""
        mine = select(TurnRow.kv_id).where(TurnRow.session_id == session_id, TurnRow.kv_id.is_not(None))
        others = select(TurnRow.kv_id).where(TurnRow.session_id != session_id, TurnRow.kv_id.is_not(None))
        rows = await self._session.scalars(mine.where(TurnRow.kv_id.not_in(others)).distinct())
        return [kv_id for kv_id in rows if kv_id is not None]

    async def kv_in_use(self) -> set[str]:
        """Ids of stored KV that some turn refers to."""
        rows = await self._session.scalars(select(TurnRow.kv_id).where(TurnRow.kv_id.is_not(None)).distinct())
        return {kv_id for kv_id in rows if kv_id is not None}

    async def titles(self) -> dict[str, str]:
        """The title of the first document that a stored KV is about, by the KV's id."""
        query = (
            select(TurnRow.kv_id, DocumentRow.title)
            .join(SessionRow, SessionRow.id == TurnRow.session_id)
            .join(DocumentRow, DocumentRow.id == SessionRow.document_id)
            .where(TurnRow.kv_id.is_not(None))
        )
        return {kv_id: title for kv_id, title in await self._session.execute(query) if kv_id is not None}

    async def _changed(self, query: Any) -> int:
        result = await self._session.execute(query.execution_options(synchronize_session=False))
        return cast("CursorResult[Any]", result).rowcount
