"""Deletions under way, so that a crash in the middle of one leaves nothing behind."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.models import DeletionRow, DocumentRow, SessionDocumentRow, SessionRow, TurnRow


class Deletions:
    """Rows of `deletions`, and what must be known about a document before its rows go."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, row: DeletionRow) -> None:
        self._session.add(row)
        await self._session.flush()

    async def get(self, document_id: str, owner_id: str) -> DeletionRow | None:
        query = select(DeletionRow).where(DeletionRow.document_id == document_id, DeletionRow.owner_id == owner_id)
        return await self._session.scalar(query)

    async def all(self) -> Sequence[DeletionRow]:
        return (await self._session.scalars(select(DeletionRow))).all()

    async def done(self, document_id: str) -> None:
        row = await self._session.get(DeletionRow, document_id)
        if row is not None:
            await self._session.delete(row)

    async def sessions_of(self, document_id: str) -> list[str]:
        query = select(SessionDocumentRow.session_id).where(SessionDocumentRow.document_id == document_id)
        return list((await self._session.scalars(query)).all())

    async def turns_of(self, document_id: str) -> list[tuple[str, str | None, int]]:
        """Per turn of the document's sessions: in whose part of the store its KV is (the owner's of the first
        document), the id of its KV, and the bytes of question and answer."""
        query = (
            select(DocumentRow.owner_id, TurnRow.kv_id, TurnRow.question, TurnRow.answer)
            .join(SessionDocumentRow, SessionDocumentRow.session_id == TurnRow.session_id)
            .join(SessionRow, SessionRow.id == TurnRow.session_id)
            .join(DocumentRow, DocumentRow.id == SessionRow.document_id)
            .where(SessionDocumentRow.document_id == document_id)
        )
        rows = (await self._session.execute(query)).all()
        return [(owner, kv_id, len(text.encode()) + len(answer.encode())) for owner, kv_id, text, answer in rows]
