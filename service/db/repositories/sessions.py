"""Sessions by owner."""

from collections.abc import Sequence

from sqlalchemy import and_, exists, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.models import DocumentRow, SessionDocumentRow, SessionRow
from service.db.people import ShareRow
from service.db.repositories.shares import is_for, shared_documents


class Sessions:
    """Rows of `sessions`. A call that names an owner finds nothing of another one."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, row: SessionRow) -> None:
        self._session.add(row)
        await self._session.flush()

    async def get(self, session_id: str, owner_id: str | None) -> SessionRow | None:
        query = select(SessionRow).where(SessionRow.id == session_id)
        if owner_id is not None:
            query = query.where(SessionRow.owner_id == owner_id)
        return await self._session.scalar(query)

    async def of_owner(self, owner_id: str) -> list[str]:
        """Ids of all of them."""
        return list((await self._session.scalars(select(SessionRow.id).where(SessionRow.owner_id == owner_id))).all())

    async def page(
        self, owner_id: str, *, limit: int, after: SessionRow | None, now: float, shared: bool = False
    ) -> Sequence[SessionRow]:
        """Their own, or those of others that are `shared` with them, newest first, from just after the row `after`,
        without those of a document whose time is over at `now`, or that is not shared with them any more."""
        over = and_(DocumentRow.expires_at <= now, DocumentRow.pinned.is_(False))
        theirs = DocumentRow.id.in_(shared_documents(owner_id, now).subquery().select())
        lost = and_(DocumentRow.owner_id != owner_id, ~theirs)
        # Of each session that is listed, so that others' sessions are not looked at.
        its = SessionDocumentRow.session_id == SessionRow.id
        gone = exists().where(its, SessionDocumentRow.document_id == DocumentRow.id, or_(over, lost))
        query = select(SessionRow).where(SessionRow.owner_id == owner_id, ~gone)
        if shared:
            given = select(ShareRow.session_id).where(ShareRow.session_id.is_not(None), is_for(owner_id, now))
            others = SessionRow.owner_id != owner_id
            query = select(SessionRow).where(others, SessionRow.id.in_(given), ~gone)
        if after is not None:
            same_time = and_(SessionRow.created_at == after.created_at, SessionRow.id < after.id)
            query = query.where(or_(SessionRow.created_at < after.created_at, same_time))
        query = query.order_by(SessionRow.created_at.desc(), SessionRow.id.desc()).limit(limit)
        return (await self._session.scalars(query)).all()

    async def touch(self, session_id: str, now: float) -> None:
        await self._session.execute(update(SessionRow).where(SessionRow.id == session_id).values(updated_at=now))

    async def remove(self, row: SessionRow) -> None:
        """Remove the session with its turns."""
        await self._session.delete(row)
        await self._session.flush()
