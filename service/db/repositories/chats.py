"""Prompts that were seen before, stored responses, uploads in parts; sessions by how they begin."""

from collections.abc import Sequence

from sqlalchemy import delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.chats import PromptRow, ResponseRow, UploadRow
from service.db.models import DocumentRow, SessionRow, TurnRow


class Chats:
    """Every call that names an owner finds nothing of another one."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, row: ResponseRow | UploadRow) -> None:
        self._session.add(row)
        await self._session.flush()

    async def document_of_text(self, owner_id: str, digest: str, now: float) -> DocumentRow | None:
        """The newest document that is ready, with this text."""
        alive = or_(DocumentRow.expires_at.is_(None), DocumentRow.expires_at > now, DocumentRow.pinned)
        query = select(DocumentRow).where(
            DocumentRow.owner_id == owner_id, DocumentRow.text_digest == digest, DocumentRow.status == "ready", alive
        )
        return await self._session.scalar(query.order_by(DocumentRow.created_at.desc()).limit(1))

    async def see_prompt(self, owner_id: str, digest: str, now: float) -> PromptRow:
        """Count one more sight of a text; in a unit of work that is alone."""
        row = await self._session.get(PromptRow, (owner_id, digest))
        if row is None:
            row = PromptRow(owner_id=owner_id, digest=digest, seen=0, last_seen_at=now)
            self._session.add(row)
        row.seen, row.last_seen_at = row.seen + 1, now
        await self._session.flush()
        return row

    async def set_prompt_document(self, owner_id: str, digest: str, document_id: str) -> None:
        if (row := await self._session.get(PromptRow, (owner_id, digest))) is not None:
            row.document_id = document_id
            await self._session.flush()

    async def forget_prompts(self, before: float) -> None:
        """Remove those that were seen last before this."""
        await self._session.execute(delete(PromptRow).where(PromptRow.last_seen_at < before))

    async def sessions_beginning(
        self, owner_id: str, document_id: str, question: str, *, limit: int
    ) -> Sequence[SessionRow]:
        """Sessions without instructions whose first document and first question these are, newest first."""
        query = (
            select(SessionRow)
            .join(TurnRow, TurnRow.session_id == SessionRow.id)
            .where(
                SessionRow.owner_id == owner_id,
                SessionRow.document_id == document_id,
                SessionRow.instructions == "",
                TurnRow.ordinal == 1,
                TurnRow.question == question,
            )
            .order_by(SessionRow.updated_at.desc(), SessionRow.id.desc())
            .limit(limit)
        )
        return (await self._session.scalars(query)).all()

    async def turn_of(self, owner_id: str, answer_id: str) -> TurnRow | None:
        """A turn of any of an owner's sessions."""
        query = select(TurnRow).join(SessionRow, SessionRow.id == TurnRow.session_id)
        return await self._session.scalar(query.where(TurnRow.id == answer_id, SessionRow.owner_id == owner_id))

    async def old_sessions(self, before: float) -> list[tuple[str, str]]:
        """Owner and id of sessions that chats began, and that nobody has asked in since."""
        query = select(SessionRow.owner_id, SessionRow.id).where(
            SessionRow.origin == "chat", SessionRow.updated_at < before
        )
        return [(row[0], row[1]) for row in await self._session.execute(query.limit(1000))]

    async def response(self, owner_id: str, response_id: str) -> ResponseRow | None:
        query = select(ResponseRow).where(ResponseRow.id == response_id, ResponseRow.owner_id == owner_id)
        return await self._session.scalar(query)

    async def remove_response(self, row: ResponseRow) -> int:
        """How many others there are in its session."""
        await self._session.execute(delete(ResponseRow).where(ResponseRow.id == row.id))
        others = select(func.count()).select_from(ResponseRow).where(ResponseRow.session_id == row.session_id)
        return await self._session.scalar(others) or 0

    async def upload(self, owner_id: str, upload_id: str) -> UploadRow | None:
        query = select(UploadRow).where(UploadRow.id == upload_id, UploadRow.owner_id == owner_id)
        return await self._session.scalar(query)

    async def pending_uploads(self, owner_id: str, now: float) -> int:
        query = select(func.count()).select_from(UploadRow)
        pending = (UploadRow.owner_id == owner_id, UploadRow.status == "pending", UploadRow.expires_at > now)
        return await self._session.scalar(query.where(*pending)) or 0

    async def uploads_with_parts(self, now: float) -> set[str]:
        """Ids of those that may still get parts."""
        query = select(UploadRow.id).where(UploadRow.status == "pending", UploadRow.expires_at > now)
        return set((await self._session.scalars(query)).all())

    async def forget_uploads(self, before: float) -> None:
        """Remove those whose time was over before this."""
        await self._session.execute(delete(UploadRow).where(UploadRow.expires_at < before))
