"""Documents on their way, in this process. The row is the job: what is unfinished at start goes on."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from ingest.errors import IngestError
from service.core import statuses
from service.core.artifacts import Artifacts
from service.core.clock import Clock
from service.core.ingestion import Ingestion
from service.core.outages import through_outages
from service.core.progress import ProgressBoard
from service.db.engine import Database
from service.db.models import DocumentRow
from service.engine.messages import DocumentRef
from service.errors import DatabaseUnavailable, ServiceError, StorageFull

T = TypeVar("T")

_STORE_PROGRESS_S = 1.0
_RETRY_S = 2.0
_log = structlog.get_logger("preread.jobs")


class Jobs:
    """One task per unfinished document; `Ingestion` bounds how many work at the same time."""

    def __init__(
        self, db: Database, ingestion: Ingestion, artifacts: Artifacts, board: ProgressBoard, clock: Clock
    ) -> None:
        self._db = db
        self._ingestion = ingestion
        self._artifacts = artifacts
        self._board = board
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._passwords: dict[str, str] = {}
        self._writer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take up what an earlier process left unfinished."""
        self._writer = asyncio.create_task(self._store_progress())
        async with self._db.reading() as uow:
            unfinished = await uow.documents.with_status(statuses.UNFINISHED)
        for row in unfinished:
            self.submit(row)

    async def close(self) -> None:
        """Stop working. Rows stay as they are, so that the next start goes on."""
        tasks = [*self._tasks.values(), *([self._writer] if self._writer else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(self, row: DocumentRow, password: str | None = None) -> None:
        """Begin or go on with a document. The password stays in memory, until the file has been parsed."""
        if password is not None:
            self._passwords[row.id] = password
        task = asyncio.create_task(self._run(row.id, row.owner_id), name=f"ingest {row.id}")
        self._tasks[row.id] = task
        task.add_done_callback(lambda done: self._drop(row.id, done))

    async def stop(self, document_id: str) -> None:
        """End the work on a document; returns when nothing of it runs any more."""
        if task := self._tasks.get(document_id):
            task.cancel()
            await asyncio.wait({task})

    @property
    def running(self) -> int:
        return len(self._tasks)

    def _drop(self, document_id: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            _log.error("document left for the next start", document_id=document_id, exc_info=error)
        self._tasks.pop(document_id, None)
        self._passwords.pop(document_id, None)
        self._board.finish(document_id)

    async def _run(self, document_id: str, owner_id: str) -> None:
        started = time.monotonic()
        ref = DocumentRef(owner_id, document_id)
        try:
            await through_outages(lambda: self._attempt(document_id))
        except IngestError as error:
            await self._fail(ref, error.code, str(error))
        except ServiceError as error:
            # NotFound is no exception: a document that was cancelled or removed has ended, so nothing is changed.
            await self._fail(ref, error.code, error.detail)
        except Exception as error:
            _log.error("document failed", document_id=document_id, exc_info=error)
            await self._fail(ref, "internal_error", "The server failed on this document; its log says why.")
        else:
            _log.info("document done", document_id=document_id, seconds=round(time.monotonic() - started, 3))

    async def _attempt(self, document_id: str) -> None:
        """Until the end, or until the database goes away: then the password is kept for the next one."""
        password = self._passwords.get(document_id)
        try:
            await self._ingestion.run(document_id, lambda: self._passwords.pop(document_id, None))
        except DatabaseUnavailable:
            if password is not None:
                self._passwords[document_id] = password
            raise

    async def _fail(self, ref: DocumentRef, code: str, detail: str) -> None:
        """Say why, give the bytes free to be uploaded again, and leave nothing else behind."""
        if await _once_there_is_room(lambda: self.finish(ref.document_id, statuses.FAILED, code, detail)):
            _log.warning("document refused", document_id=ref.document_id, code=code)
            await _once_there_is_room(lambda: self._artifacts.remove(ref))

    async def finish(self, document_id: str, status: str, code: str, detail: str) -> bool:
        """End an unfinished document as `failed` or `cancelled`; False when it had ended already."""
        async with self._db.writing() as uow:
            changed = await uow.documents.change(
                document_id,
                only_if=statuses.UNFINISHED,
                status=status,
                error_code=code,
                error_detail=detail,
                dedupe_key=document_id,
                snapshot_state="absent",
                token_ids=None,
                updated_at=self._clock.now(),
            )
            if changed:
                await uow.pages.remove(document_id)
        self._board.wake(document_id)
        return changed

    async def _store_progress(self) -> None:
        """Write the board to the rows now and then, so that a restarted server still knows it."""
        while True:
            await asyncio.sleep(_STORE_PROGRESS_S)
            try:
                await self.store_progress()
            except DatabaseUnavailable:
                continue  # the next one is as good
            except Exception as error:
                _log.error("progress was not stored", exc_info=error)

    async def store_progress(self) -> None:
        for document_id in list(self._tasks):
            if (progress := self._board.latest(document_id)) is None:
                continue
            async with self._db.writing() as uow:
                await uow.documents.change(
                    document_id,
                    only_if=statuses.before(progress.stage),
                    status=progress.stage,
                    progress_done=progress.done,
                    progress_total=progress.total,
                    progress_unit=progress.unit,
                    progress_eta_s=progress.eta_s,
                )


async def _once_there_is_room(step: Callable[[], Awaitable[T]]) -> T:
    """A full disk, or no database, at the end of a document must not keep it unfinished for ever."""
    while True:
        try:
            return await through_outages(step)
        except StorageFull:
            await asyncio.sleep(_RETRY_S)
