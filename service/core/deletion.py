"""Removing a document from every tier, and saying what was there.

The rows go first, in one transaction with a note of what is still to be cleaned: from then on the document is
unknown everywhere. The note goes last, so that a crash in between is finished at the next start.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict

import structlog

from service.core.artifacts import Artifacts, Removed
from service.core.audit import acting_with, record
from service.core.clock import Clock
from service.core.jobs import Jobs
from service.core.progress import ProgressBoard
from service.core.snapshots import Snapshots
from service.db.engine import Database
from service.db.models import DeletionRow, DocumentRow
from service.db.repositories import UnitOfWork
from service.engine.messages import DocumentRef
from service.errors import DatabaseUnavailable, NotFound, StorageFull

OnRemoved = Callable[[str, list[str]], Awaitable[None]]
"""Called with a document id and the ids of its sessions, once their rows are gone: stop what uses them."""
EXPIRE = "expire"
"""What the audit log says of a document whose time is over: that is nobody's doing."""
OLD_S = 300.0
"""A deletion that is under way for so long is not anybody's any more; finishing one twice does no harm."""
_log = structlog.get_logger("preread.deletion")


def expired(row: DocumentRow, now: float) -> bool:
    """Whether a document's time is over; a pinned one does not expire."""
    return row.expires_at is not None and row.expires_at <= now and not row.pinned


class Deletion:
    """`listeners` are told before the tiers are cleaned."""

    def __init__(
        self,
        db: Database,
        jobs: Jobs,
        snapshots: Snapshots,
        artifacts: Artifacts,
        board: ProgressBoard,
        clock: Clock,
        *,
        alone: bool,
    ) -> None:
        self._db = db
        self._jobs = jobs
        self._snapshots = snapshots
        self._artifacts = artifacts
        self._board = board
        self._clock = clock
        self._alone = alone
        self.listeners: list[OnRemoved] = []
        self._refused: list[DeletionRow] = []

    async def delete(self, owner_id: str, document_id: str, *, action: str = "delete") -> list[Removed]:
        """The receipt, per tier; `action` is what the audit log says. Raises NotFound when there is neither the
        document nor a note of it."""
        async with self._db.writing() as uow:
            row = await uow.documents.get(document_id, owner_id)
            note = await uow.deletions.get(document_id, owner_id)
            if row is not None:
                note = await self._note(uow, row)
                await uow.deletions.add(note)
                await uow.documents.remove(document_id)
                # Whoever looked at it first has not removed it.
                with nullcontext() if action != EXPIRE else acting_with(None):
                    await record(uow, self._clock.now(), owner_id, action, document_id)
        if note is None:
            raise NotFound("There is no such document.")
        # Whoever asked may leave; the document must not stay half removed.
        return await asyncio.shield(asyncio.ensure_future(self._clean_now(note)))

    async def finish_all(self) -> None:
        """At start: deletions that a crash, or a full disk, cut short. A disk that is full still is no reason not to
        start: what it refuses is tried again by `finish_far`."""
        async with self._db.reading() as uow:
            notes = await uow.deletions.all()
        await self._finish(notes)

    async def finish_far(self) -> None:
        """Remove from the tiers what was deleted while one of them was down, what the disk refused at start, and what
        another process was removing when it was lost."""
        notes, self._refused = self._refused, []
        if not self._alone:
            old = self._clock.now() - OLD_S
            async with self._db.reading() as uow:
                notes += [note for note in await uow.deletions.all() if note.created_at < old]
        await self._finish(notes)
        await self._artifacts.finish_removals()

    async def _finish(self, notes: Sequence[DeletionRow]) -> None:
        for note in notes:
            try:
                await self._clean(note)
            except (StorageFull, DatabaseUnavailable) as error:
                _log.warning("a deletion is not finished", document_id=note.document_id, exc_info=error)
                self._refused.append(note)

    async def delete_expired(self) -> int:
        """Remove what is past its time; how many there were."""
        async with self._db.reading() as uow:
            rows = await uow.documents.expired(self._clock.now())
        for row in rows:
            await self.delete(row.owner_id, row.id, action=EXPIRE)
        return len(rows)

    async def _note(self, uow: UnitOfWork, row: DocumentRow) -> DeletionRow:
        turns = await uow.deletions.turns_of(row.id)
        # KV of a session that begins with another owner's document is with that one's.
        kv_ids = {kv_id if owner == row.owner_id else f"{owner}/{kv_id}" for owner, kv_id, _ in turns if kv_id}
        n_pages, n_chars = await uow.pages.text_size(row.id)
        removed = [
            Removed("text", n_pages, n_chars),
            Removed("turns", len(turns), sum(nbytes for _, _, nbytes in turns)),
        ]
        return DeletionRow(
            document_id=row.id,
            owner_id=row.owner_id,
            kv_ids=sorted(kv_ids),
            session_ids=await uow.deletions.sessions_of(row.id),
            removed=[asdict(part) for part in removed],
            created_at=self._clock.now(),
        )

    async def _clean_now(self, note: DeletionRow) -> list[Removed]:
        try:
            return await self._clean(note)
        except DatabaseUnavailable:  # the note is there still, and what it names is removed by the sweeper
            self._refused.append(note)
            raise

    async def _clean(self, note: DeletionRow) -> list[Removed]:
        self._board.wake(note.document_id)
        await self._jobs.stop(note.document_id)
        await self._snapshots.stop(note.document_id)
        for listener in self.listeners:
            await listener(note.document_id, note.session_ids)
        removed = await self._artifacts.remove(
            DocumentRef(note.owner_id, note.document_id), kv_ids=note.kv_ids, session_ids=note.session_ids
        )
        async with self._db.writing() as uow:
            await uow.deletions.done(note.document_id)
        _log.info("document removed", document_id=note.document_id)
        return [*removed, *(Removed(**part) for part in note.removed)]
