"""Documents as their owner sees and changes them."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service.core import statuses
from service.core.access import OWNER, READ, Reached, reached_document
from service.core.artifacts import Artifacts, Place, Removed
from service.core.audit import record
from service.core.clock import Clock
from service.core.deletion import EXPIRE, Deletion, expired
from service.core.files import Files
from service.core.jobs import Jobs
from service.core.outages import KEEP_S, through_outages
from service.core.pins import settle_far_pins
from service.core.progress import Progress, ProgressBoard
from service.core.uploads import check_title, check_ttl, check_visibility
from service.db.engine import Database
from service.db.models import DocumentRow, PageRow
from service.engine.messages import DocumentRef
from service.errors import Conflict, Invalid, NotFound
from service.words import counted


@dataclass(frozen=True, slots=True)
class DocumentView:
    """A row, and how far it is right now: `status` may be ahead of the row's, never behind. `tiers`: where the snapshot
    is; `access`: what whoever looks may do, `owner`, `ask` or `read`."""

    row: DocumentRow
    status: str
    progress: Progress
    access: str = OWNER
    tiers: dict[str, Place] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DocumentChanges:
    """Columns to set. `ttl_s` counts from now; None means never, and is only looked at with `set_ttl`."""

    title: str | None = None
    pinned: bool | None = None
    visibility: str | None = None
    set_ttl: bool = False
    ttl_s: int | None = None


class DocumentService:
    """Everything but the upload. Who looks may be its owner, or somebody it is shared with (`service.core.access`);
    only its owner changes it. A document past its time is removed by whoever looks at it first."""

    def __init__(
        self,
        db: Database,
        files: Files,
        jobs: Jobs,
        deletion: Deletion,
        artifacts: Artifacts,
        board: ProgressBoard,
        clock: Clock,
    ) -> None:
        self._db = db
        self._files = files
        self._jobs = jobs
        self._deletion = deletion
        self._artifacts = artifacts
        self._board = board
        self._clock = clock

    async def get(self, owner_id: str, document_id: str) -> DocumentView:
        """Raises NotFound, also for a document that is neither theirs nor shared with them."""
        reached = await self._reached(owner_id, document_id)
        return self.view(reached.row, reached.access)

    def view(self, row: DocumentRow, access: str = OWNER) -> DocumentView:
        progress = self._progress(row)
        ahead = progress.stage in statuses.ORDER and row.status in statuses.before(progress.stage)
        return DocumentView(row, progress.stage if ahead else row.status, progress, access, self._tiers(row))

    async def page(
        self, owner_id: str, *, limit: int, after: str | None, shared: bool = False
    ) -> tuple[Sequence[DocumentView], bool]:
        """Their own documents, or those of others that are `shared` with them, newest first, and whether there are
        more. Raises NotFound for an `after` that is not in the list."""
        now = self._clock.now()
        async with self._db.reading() as uow:
            last = await reached_document(uow, owner_id, after, now) if after else None
            if after and (last is None or (last.access != OWNER) != shared):
                raise NotFound("`after` is not the id of a document of this list.", param="after")
            rows = await uow.documents.page(
                owner_id, limit=limit + 1, after=last.row if last else None, shared_at=now if shared else None
            )
            levels = await uow.shares.document_accesses(owner_id, [row.id for row in rows], now) if shared else {}
        live = [row for row in rows[:limit] if not expired(row, now)]
        return [self.view(row, levels.get(row.id, READ) if shared else OWNER) for row in live], len(rows) > limit

    async def change(self, owner_id: str, document_id: str, changes: DocumentChanges) -> DocumentView:
        """Raises NotFound, Forbidden, Invalid, StorageFull (only when the disk does not take the mark of a pinned
        document)."""
        values = self._values(changes)
        await self._own(owner_id, document_id)
        async with self._db.writing() as uow:
            await uow.documents.change(document_id, updated_at=self._clock.now(), **values)
            await record(uow, self._clock.now(), owner_id, "change", document_id)
        if changes.pinned is not None:
            await self._artifacts.pin(DocumentRef(owner_id, document_id), changes.pinned)
            await settle_far_pins(self._db, self._artifacts)
        return await self.get(owner_id, document_id)

    async def cancel(self, owner_id: str, document_id: str) -> DocumentView:
        """Stop reading a document, remove what was made of it. Raises NotFound, Forbidden, or Conflict at its end."""
        await self._own(owner_id, document_id)
        cancelled = await self._jobs.finish(
            document_id, statuses.CANCELLED, "cancelled", "Reading this document was cancelled."
        )
        if cancelled:
            await self._jobs.stop(document_id)
            await self._artifacts.remove(DocumentRef(owner_id, document_id))
        view = await self.get(owner_id, document_id)
        if view.row.status != statuses.CANCELLED:
            raise Conflict(f"The document is {view.row.status} already; delete it to remove it.", code="already_ended")
        return view

    async def text_page(self, owner_id: str, document_id: str, number: int) -> PageRow:
        """Raises NotFound for a page there is not, Conflict while pages are still being read."""
        row = (await self._reached(owner_id, document_id)).row
        if 1 <= number <= (row.page_count or 0):
            async with self._db.reading() as uow:
                page = await uow.pages.get(document_id, number)
            if page is not None:
                return page
        if row.page_count is None and row.status in statuses.UNFINISHED:
            raise Conflict("The document's pages are still being read.", code="document_not_ready")
        raise NotFound(f"The document has {counted(row.page_count or 0, 'page')}; there is no page {number}.")

    async def original(self, owner_id: str, document_id: str) -> tuple[DocumentRow, Path]:
        """The row and the path of the uploaded bytes. Raises NotFound."""
        row = (await self._reached(owner_id, document_id)).row
        path = self._files.path(document_id)
        if not path.is_file():
            raise NotFound("The original is not kept of a document that failed or was cancelled.")
        return row, path

    async def delete(self, owner_id: str, document_id: str) -> list[Removed]:
        """The receipt, per tier. Raises NotFound, Forbidden."""
        async with self._db.reading() as uow:
            reached = await reached_document(uow, owner_id, document_id, self._clock.now())
        if reached is not None:
            reached.require(OWNER)
        return await self._deletion.delete(owner_id, document_id)

    async def changes(self, owner_id: str, document_id: str) -> AsyncIterator[DocumentView]:
        """The document now and after each change, through its end. Raises NotFound once it is removed."""
        while True:
            changed = self._board.next_change(document_id)
            view = await through_outages(lambda: self.get(owner_id, document_id), within_s=KEEP_S)
            yield view
            if view.row.status in statuses.TERMINAL:
                self._board.wake(document_id)
                return
            await changed.wait()

    async def _reached(self, owner_id: str, document_id: str) -> Reached:
        async with self._db.reading() as uow:
            reached = await reached_document(uow, owner_id, document_id, self._clock.now())
        if reached is not None and expired(reached.row, self._clock.now()):
            await self._deletion.delete(reached.row.owner_id, document_id, action=EXPIRE)
            reached = None
        if reached is None:
            raise NotFound("There is no such document.")
        return reached

    async def _own(self, owner_id: str, document_id: str) -> DocumentRow:
        return (await self._reached(owner_id, document_id)).require(OWNER)

    def _tiers(self, row: DocumentRow) -> dict[str, Place]:
        ref = DocumentRef(row.owner_id, row.id)
        here = row.snapshot_state == "ready" and not self._artifacts.left_disk(ref)
        return ({"disk": Place("ready")} if here else {}) | self._artifacts.places(ref)

    def _values(self, changes: DocumentChanges) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if changes.title is not None:
            check_title(changes.title)
            if not changes.title.strip():
                raise Invalid("A title cannot be empty.", param="title")
            values["title"] = changes.title.strip()
        if changes.visibility is not None:
            check_visibility(changes.visibility)
            values["visibility"] = changes.visibility
        if changes.pinned is not None:
            values["pinned"] = changes.pinned
        if changes.set_ttl:
            check_ttl(changes.ttl_s)
            values["expires_at"] = None if changes.ttl_s is None else self._clock.now() + changes.ttl_s
        return values

    def _progress(self, row: DocumentRow) -> Progress:
        live = self._board.latest(row.id)
        if row.status in statuses.UNFINISHED and live is not None:
            return live
        if row.status == statuses.READY:
            n_tokens = row.token_count or 0
            return Progress(statuses.READY, n_tokens, n_tokens, "tokens", 0.0)
        return Progress(row.status, row.progress_done, row.progress_total, row.progress_unit, row.progress_eta_s)
