"""What others may see, and who they are."""

from collections.abc import Collection, Sequence

from sqlalchemy import ColumnElement, Select, delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.models import SessionDocumentRow
from service.db.people import ShareRow, UserRow
from service.db.repositories.rows import insert


class Shares:
    """Rows of `shares`. `who` is the id of a user, or of a link."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, row: ShareRow) -> None:
        """Raises AlreadyExists when it is shared with them already."""
        await insert(self._session, row, row.subject)

    async def get(self, share_id: str) -> ShareRow | None:
        return await self._session.scalar(select(ShareRow).where(ShareRow.id == share_id))

    async def of_document(self, document_id: str) -> Sequence[ShareRow]:
        return await self._all(ShareRow.document_id == document_id)

    async def of_session(self, session_id: str) -> Sequence[ShareRow]:
        return await self._all(ShareRow.session_id == session_id)

    async def remove(self, share_id: str) -> None:
        await self._session.execute(delete(ShareRow).where(ShareRow.id == share_id))

    async def document_access(self, who: str, document_id: str, now: float) -> str | None:
        """`read` or `ask` when a document, or a session about it, is shared with them."""
        return (await self.document_accesses(who, [document_id], now)).get(document_id)

    async def document_accesses(self, who: str, document_ids: Collection[str], now: float) -> dict[str, str]:
        """`read` or `ask` by the ids of those documents that are shared with them, or a session about which is.

        It goes from what is shared with them to its documents: what there is of the document, others' sessions about it
        and shares of it, is not looked at, so that nothing is told by how long it takes.
        """
        shared = func.coalesce(ShareRow.document_id, SessionDocumentRow.document_id)
        levels = select(shared, ShareRow.access).outerjoin(
            SessionDocumentRow, SessionDocumentRow.session_id == ShareRow.session_id
        )
        found: dict[str, str] = {}
        for document_id, level in await self._session.execute(
            levels.where(is_for(who, now), shared.in_(document_ids)).distinct()
        ):
            found[document_id] = max(found.get(document_id, level), level, key=("read", "ask").index)
        return found

    async def session_access(self, who: str, session_id: str, now: float) -> str | None:
        """`read` or `ask` when a session is shared with them."""
        return await self._most(select(ShareRow.access).where(is_for(who, now), ShareRow.session_id == session_id))

    async def _most(self, levels: Select[str]) -> str | None:
        return max((await self._session.scalars(levels.distinct())).all(), key=("read", "ask").index, default=None)

    async def _all(self, condition: ColumnElement[bool]) -> Sequence[ShareRow]:
        query = select(ShareRow).where(condition).order_by(ShareRow.created_at, ShareRow.id)
        return (await self._session.scalars(query)).all()


def is_for(who: str, now: float) -> ColumnElement[bool]:
    """Whether a share is meant for them, by their name, their organization or their link, and lasts still."""
    theirs = select(UserRow.organization_id).where(UserRow.id == who).scalar_subquery()
    lasts = or_(ShareRow.expires_at.is_(None), ShareRow.expires_at > now)
    # The user `local` and the organization `local` have the same id: what is for one is not for the other.
    for_all = ShareRow.kind == "organization"
    return or_(~for_all & (ShareRow.subject == who), for_all & (ShareRow.subject == theirs)) & lasts


def shared_documents(who: str, now: float):
    """A selection of the ids of all documents that are shared with them."""
    by_session = select(SessionDocumentRow.document_id).join(
        ShareRow, ShareRow.session_id == SessionDocumentRow.session_id
    )
    directly = select(ShareRow.document_id).where(ShareRow.document_id.is_not(None), is_for(who, now))
    return directly.union(by_session.where(is_for(who, now)))
