"""Turns of sessions: questions, answers, and which KV they left."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import and_, func, literal_column, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import undefer

from service.db.models import DocumentRow, ProcessRow, SessionRow, TurnRow
from service.db.people import ShareRow
from service.db.repositories.rows import changed

_IN_CONTEXT = or_(TurnRow.status == "done", and_(TurnRow.status == "cancelled", TurnRow.kv_id.is_not(None)))
_IS_FREE = or_(TurnRow.lease_owner.is_(None), TurnRow.lease_owner.not_in(select(ProcessRow.id)))
# Written out, so that the index of running answers is used.
_IS_RUNNING = literal_column("turns.status") == literal_column("'running'")


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

    async def finish(self, answer_id: str, *, held_by: str, **values: Any) -> bool:
        """Set the columns of a turn that ended. False when it was removed meanwhile, or another process has it."""
        query = update(TurnRow).where(TurnRow.id == answer_id, TurnRow.lease_owner == held_by)
        return await changed(self._session, query.values(lease_owner=None, **values)) == 1

    async def is_running_elsewhere(self, session_id: str, process_id: str) -> bool:
        """Whether another process than this answers a question of the session, or did when it was lost."""
        query = select(TurnRow.id).where(
            TurnRow.session_id == session_id, TurnRow.status == "running", TurnRow.lease_owner != process_id
        )
        return await self._session.scalar(query.limit(1)) is not None

    async def running_of(self, session_id: str) -> list[str]:
        """Ids of the answers that run in a session."""
        query = select(TurnRow.id).where(TurnRow.session_id == session_id, TurnRow.status == "running")
        return list((await self._session.scalars(query)).all())

    async def running_for(self, user_id: str) -> int:
        """How many answers run in sessions of a user, and in those of links that the user made."""
        links = select(ShareRow.id).where(ShareRow.created_by == user_id, ShareRow.kind == "link")
        theirs = or_(SessionRow.owner_id == user_id, SessionRow.owner_id.in_(links))
        query = select(func.count()).select_from(TurnRow).join(SessionRow, SessionRow.id == TurnRow.session_id)
        return await self._session.scalar(query.where(_IS_RUNNING, theirs)) or 0

    async def free(self, *, limit: int) -> list[tuple[TurnRow, str]]:
        """Running answers that no process carries, with the owners of their sessions."""
        query = select(TurnRow, SessionRow.owner_id).join(SessionRow, SessionRow.id == TurnRow.session_id)
        rows = await self._session.execute(query.where(_IS_RUNNING, _IS_FREE).limit(limit))
        return [(row[0], row[1]) for row in rows]

    async def carried_by(self, process_id: str) -> list[tuple[TurnRow, str]]:
        """Running answers that a process carries, by their rows, with the owners of their sessions."""
        query = select(TurnRow, SessionRow.owner_id).join(SessionRow, SessionRow.id == TurnRow.session_id)
        rows = await self._session.execute(query.where(_IS_RUNNING, TurnRow.lease_owner == process_id))
        return [(row[0], row[1]) for row in rows]

    async def claim(self, answer_id: str, process_id: str) -> bool:
        """Make a running answer a process's own, unless another one that lives carries it."""
        query = update(TurnRow).where(TurnRow.id == answer_id, TurnRow.status == "running", _IS_FREE)
        return await changed(self._session, query.values(lease_owner=process_id)) == 1

    async def follow(self, answer_id: str) -> None:
        """Say that somebody reads a running answer at another process than the one that carries it."""
        query = update(TurnRow).where(TurnRow.id == answer_id, TurnRow.status == "running")
        await changed(self._session, query.values(followed=TurnRow.followed + 1))

    async def followed(self, answer_id: str) -> int:
        """How often that was said."""
        return await self._session.scalar(select(TurnRow.followed).where(TurnRow.id == answer_id)) or 0

    async def fail_running(self, code: str, detail: str, *, session_id: str | None = None) -> int:
        """Mark turns as failed that are `running` in the table but nowhere else; how many there were."""
        query = update(TurnRow).where(TurnRow.status == "running")
        if session_id is not None:
            query = query.where(TurnRow.session_id == session_id)
        ended = {"status": "failed", "error_code": code, "error_detail": detail, "kv_id": None}
        return await changed(self._session, query.values(**ended))

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
