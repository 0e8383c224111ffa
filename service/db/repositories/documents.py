"""Documents by owner, and the conditional status changes that make the row the truth of a job."""

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import and_, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.models import DocumentRow, ProcessRow, SessionDocumentRow, SessionRow
from service.db.repositories.rows import changed, insert
from service.db.repositories.shares import shared_documents

_IS_FREE = or_(DocumentRow.lease_owner.is_(None), DocumentRow.lease_owner.not_in(select(ProcessRow.id)))


class Documents:
    """Rows of `documents`. Every call that names an owner finds nothing of another one."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, row: DocumentRow) -> None:
        """Raises AlreadyExists when the owner has a document with this dedupe key."""
        await insert(self._session, row, row.dedupe_key)

    async def get(self, document_id: str, owner_id: str | None = None) -> DocumentRow | None:
        query = select(DocumentRow).where(DocumentRow.id == document_id)
        if owner_id is not None:
            query = query.where(DocumentRow.owner_id == owner_id)
        return await self._session.scalar(query)

    async def by_dedupe_key(self, owner_id: str, dedupe_key: str) -> DocumentRow | None:
        return await self._session.scalar(
            select(DocumentRow).where(DocumentRow.owner_id == owner_id, DocumentRow.dedupe_key == dedupe_key)
        )

    async def page(
        self, owner_id: str, *, limit: int, after: DocumentRow | None, shared_at: float | None = None
    ) -> Sequence[DocumentRow]:
        """Newest first, from just after the row `after`; with a time, those of others that are shared with them."""
        query = select(DocumentRow).where(DocumentRow.owner_id == owner_id)
        if shared_at is not None:
            shared = shared_documents(owner_id, shared_at).subquery().select()
            query = select(DocumentRow).where(DocumentRow.owner_id != owner_id, DocumentRow.id.in_(shared))
        if after is not None:
            same_time = and_(DocumentRow.created_at == after.created_at, DocumentRow.id < after.id)
            query = query.where(or_(DocumentRow.created_at < after.created_at, same_time))
        query = query.order_by(DocumentRow.created_at.desc(), DocumentRow.id.desc()).limit(limit)
        return (await self._session.scalars(query)).all()

    async def with_status(self, statuses: Collection[str]) -> Sequence[DocumentRow]:
        """Oldest first, of every owner."""
        query = select(DocumentRow).where(DocumentRow.status.in_(statuses)).order_by(DocumentRow.created_at)
        return (await self._session.scalars(query)).all()

    async def expired(self, now: float) -> Sequence[DocumentRow]:
        """Documents whose time is over; a pinned one does not expire."""
        query = select(DocumentRow).where(DocumentRow.expires_at <= now, DocumentRow.pinned.is_(False))
        return (await self._session.scalars(query)).all()

    async def is_leased(self, document_id: str) -> bool:
        """Whether a process works on it."""
        query = select(DocumentRow.id).where(DocumentRow.id == document_id, ~_IS_FREE)
        return await self._session.scalar(query) is not None

    async def is_any_free(self, statuses: Collection[str]) -> bool:
        """Whether there is one that no process works on."""
        query = select(DocumentRow.id).where(DocumentRow.status.in_(statuses), _IS_FREE).limit(1)
        return await self._session.scalar(query) is not None

    async def take_up(self, process_id: str, statuses: Collection[str], *, limit: int | None) -> Sequence[DocumentRow]:
        """Make documents that no process works on a process's own; those that became so, oldest first."""
        free = select(DocumentRow.id).where(DocumentRow.status.in_(statuses), _IS_FREE)
        ids = (await self._session.scalars(free.order_by(DocumentRow.created_at).limit(limit))).all()
        mine = update(DocumentRow).where(DocumentRow.id.in_(ids), DocumentRow.status.in_(statuses), _IS_FREE)
        await changed(self._session, mine.values(lease_owner=process_id))
        taken = select(DocumentRow).where(DocumentRow.id.in_(ids), DocumentRow.lease_owner == process_id)
        return (await self._session.scalars(taken.order_by(DocumentRow.created_at))).all()

    async def claim(self, document_id: str, process_id: str, *, only_if: Collection[str], **values: Any) -> bool:
        """Make a document a process's own, unless another one that lives works on it; False then. It may be so already:
        the reply to an earlier claim was lost."""
        free = or_(_IS_FREE, DocumentRow.lease_owner == process_id)
        query = update(DocumentRow).where(DocumentRow.id == document_id, DocumentRow.status.in_(only_if), free)
        return await changed(self._session, query.values(lease_owner=process_id, **values)) == 1

    async def unfinished_of(self, process_id: str, statuses: Collection[str]) -> Sequence[DocumentRow]:
        """Those with one of these statuses that a process works on, by their rows."""
        query = select(DocumentRow).where(DocumentRow.status.in_(statuses), DocumentRow.lease_owner == process_id)
        return (await self._session.scalars(query)).all()

    async def held(self, process_id: str, document_ids: Collection[str]) -> set[str]:
        """Which of these a process works on, by their rows."""
        query = select(DocumentRow.id).where(DocumentRow.id.in_(document_ids), DocumentRow.lease_owner == process_id)
        return set((await self._session.scalars(query)).all())

    async def marks(self, document_ids: Collection[str]) -> dict[str, tuple[Any, ...]]:
        """What changes of documents while they are worked on; without those that are gone."""
        row = DocumentRow
        columns = (row.status, row.progress_done, row.progress_total, row.snapshot_state, row.updated_at)
        found = await self._session.execute(select(row.id, *columns).where(row.id.in_(document_ids)))
        return {each[0]: tuple(each[1:]) for each in found}

    async def change(
        self, document_id: str, *, only_if: Collection[str] | None = None, held_by: str | None = None, **values: Any
    ) -> bool:
        """Set columns; with `only_if`, only while the status is one of these, with `held_by`, only while this process
        works on it. False when none was."""
        query = update(DocumentRow).where(DocumentRow.id == document_id).values(**values)
        if only_if is not None:
            query = query.where(DocumentRow.status.in_(only_if))
        if held_by is not None:
            query = query.where(DocumentRow.lease_owner == held_by)
        return await changed(self._session, query) == 1

    async def reset_snapshot_states(self, stale: Collection[str]) -> None:
        """What no process rebuilds is not being rebuilt: such states of ready documents become `absent`."""
        query = update(DocumentRow).where(
            DocumentRow.status == "ready", DocumentRow.snapshot_state.in_(stale), _IS_FREE
        )
        await self._session.execute(query.values(snapshot_state="absent", lease_owner=None))

    async def token_ids(self, document_id: str) -> bytes | None:
        """Little-endian int32 tokens of the snapshot prompt."""
        return await self._session.scalar(select(DocumentRow.token_ids).where(DocumentRow.id == document_id))

    async def ids(self) -> set[str]:
        return set((await self._session.scalars(select(DocumentRow.id))).all())

    async def pinned(self) -> Sequence[tuple[str, str]]:
        """Owner and id of every pinned document."""
        query = select(DocumentRow.owner_id, DocumentRow.id).where(DocumentRow.pinned)
        return [(row.owner_id, row.id) for row in await self._session.execute(query)]

    async def titles(self) -> dict[str, str]:
        """Of every document, by id."""
        query = select(DocumentRow.id, DocumentRow.title)
        return {row.id: row.title for row in await self._session.execute(query)}

    async def remove(self, document_id: str) -> None:
        """Remove the row with its pages, and its sessions with their turns, also those over other documents too."""
        row = await self.get(document_id)
        if row is not None:
            sessions = select(SessionDocumentRow.session_id).where(SessionDocumentRow.document_id == document_id)
            await self._session.execute(delete(SessionRow).where(SessionRow.id.in_(sessions)))
            await self._session.delete(row)
            await self._session.flush()

    async def held_by_owner(self, owner_id: str) -> tuple[int, int]:
        """How many documents an owner has, and their bytes, without those that failed or were cancelled, and without
        that of chats about none."""
        counted = select(func.count(), func.coalesce(func.sum(DocumentRow.nbytes), 0))
        query = counted.where(DocumentRow.owner_id == owner_id, DocumentRow.status.not_in(("failed", "cancelled")))
        query = query.where(DocumentRow.purpose != "blank")
        count, nbytes = (await self._session.execute(query)).one()
        return count, int(nbytes)

    async def counts(self) -> dict[str, int]:
        """How many there are of each status."""
        query = select(DocumentRow.status, func.count().label("n")).group_by(DocumentRow.status)
        return {row.status: row.n for row in await self._session.execute(query)}
