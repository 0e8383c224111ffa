"""Documents on their way, in this process. The row is the job: what is unfinished, and nobody works on, goes on."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import structlog

from ingest.errors import IngestError
from service.core import statuses
from service.core.artifacts import Artifacts
from service.core.clock import Clock
from service.core.ingestion import Ingestion
from service.core.leases import Leases
from service.core.outages import through_outages
from service.core.progress import ProgressBoard
from service.core.strays import Strays
from service.db.engine import Database
from service.db.models import DocumentRow
from service.engine.messages import DocumentRef
from service.engine.protocol import left_running
from service.errors import DatabaseUnavailable, NotFound, ServiceError, StorageFull

T = TypeVar("T")

_STORE_PROGRESS_S = 1.0
_RETRY_S = 2.0
_TAKEN_AT_ONCE = 16
"""Of a process that is gone; the others get some too."""
_ENDED_BADLY = frozenset({statuses.FAILED, statuses.CANCELLED})
_log = structlog.get_logger("preread.jobs")


class Jobs:
    """One task per unfinished document; `Ingestion` bounds how many work at the same time."""

    def __init__(
        self,
        db: Database,
        ingestion: Ingestion,
        artifacts: Artifacts,
        board: ProgressBoard,
        clock: Clock,
        leases: Leases,
    ) -> None:
        self._db = db
        self._ingestion = ingestion
        self._artifacts = artifacts
        self._board = board
        self._clock = clock
        self._leases = leases
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._passwords: dict[str, str] = {}
        self._removed_here: set[str] = set()
        self._strays = Strays(clock, leases.lease_s)
        self._unsure: dict[str, DocumentRef] = {}
        self._writer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take up what another process left unfinished, now and whenever one is gone."""
        self._writer = asyncio.create_task(self._store_progress())
        await self._take_up()
        self._leases.lost.append(self._stop_all)
        self._leases.each_beat += [self._stop_lost, self._take_up, self._take_strays]

    async def close(self) -> None:
        """Stop working. Rows stay as they are, so that the next start goes on."""
        tasks = [*self._tasks.values(), *([self._writer] if self._writer else [])]
        with left_running(self._ingestion.engine):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def submit(self, row: DocumentRow, password: str | None = None) -> None:
        """Begin or go on with a document. The password stays in memory, until the file has been parsed."""
        if password is not None:
            self._passwords[row.id] = password
        lease = row.lease_owner or self._leases.owner
        task = asyncio.create_task(self._run(DocumentRef(row.owner_id, row.id), lease), name=f"ingest {row.id}")
        self._tasks[row.id] = task
        task.add_done_callback(lambda done: self._drop(row.id, done))

    def unsure(self, ref: DocumentRef) -> None:
        """The database went away while a document was added. Once it is back: work on it, or remove its file."""
        self._unsure[ref.document_id] = ref

    async def stop(self, document_id: str) -> None:
        """End the work on a document, of which the caller removes what is there; returns when nothing of it runs any
        more."""
        self._removed_here.add(document_id)
        await self._end(document_id)
        self._removed_here.discard(document_id)

    @property
    def running(self) -> int:
        return len(self._tasks)

    def is_here(self, document_id: str) -> bool:
        """Whether this process works on a document."""
        return document_id in self._tasks

    async def _take_up(self) -> None:
        async with self._db.reading() as uow:
            if not await uow.documents.is_any_free(statuses.UNFINISHED):
                return
        limit = None if self._leases.alone else _TAKEN_AT_ONCE
        async with self._db.writing(alone=False) as uow:
            rows = await uow.documents.take_up(self._leases.owner, statuses.UNFINISHED, limit=limit)
        for row in rows:
            if row.id not in self._tasks:
                self.submit(row)

    async def _take_strays(self) -> None:
        async with self._db.reading() as uow:
            mine = {row.id: row for row in await uow.documents.unfinished_of(self._leases.owner, statuses.UNFINISHED)}
        for document_id in self._strays.due(mine.keys() - self._tasks.keys()):
            _log.warning("a document of this process was not worked on", document_id=document_id)
            self.submit(mine[document_id])
        if self._unsure:
            await self._settle()

    async def _settle(self) -> None:
        # A commit that is still under way has our lock, and is waited for.
        async with self._db.writing() as uow:
            there = {id for id in self._unsure if await uow.documents.get(id) is not None}
        for document_id, ref in list(self._unsure.items()):
            if document_id not in there:
                await self._artifacts.remove(ref)
            self._unsure.pop(document_id, None)

    async def _stop_all(self) -> None:
        """Others have this work now."""
        with left_running(self._ingestion.engine):
            await asyncio.gather(*(self._end(document_id) for document_id in list(self._tasks)))

    async def _stop_lost(self) -> None:
        """End the work on documents that were cancelled or removed by another process, or taken over."""
        if not self._tasks:
            return
        ids = list(self._tasks)
        async with self._db.reading() as uow:
            held = await uow.documents.held(self._leases.owner, ids)
        for document_id in ids:
            if document_id not in held:
                await self._end(document_id)

    async def _end(self, document_id: str) -> None:
        if task := self._tasks.get(document_id):
            task.cancel()
            await asyncio.wait({task})

    def _drop(self, document_id: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            _log.error("document left for the next start", document_id=document_id, exc_info=error)
        self._tasks.pop(document_id, None)
        self._passwords.pop(document_id, None)
        self._board.finish(document_id)

    async def _run(self, ref: DocumentRef, lease: str) -> None:
        started = time.monotonic()
        try:
            await self._until_ended(ref.document_id, lease)
        except IngestError as error:
            await self._fail(ref, lease, error.code, str(error))
        except ServiceError as error:
            # NotFound is no exception: a document that was cancelled or removed has ended, so nothing is changed.
            await self._fail(ref, lease, error.code, error.detail)
        except Exception as error:
            _log.error("document failed", document_id=ref.document_id, exc_info=error)
            await self._fail(ref, lease, "internal_error", "The server failed on this document; its log says why.")
        else:
            _log.info("document done", document_id=ref.document_id, seconds=round(time.monotonic() - started, 3))
        finally:
            if not self._leases.alone and ref.document_id not in self._removed_here:
                await self._remove_leftovers(ref)

    async def _until_ended(self, document_id: str, lease: str) -> None:
        while True:
            try:
                return await through_outages(lambda: self._attempt(document_id, lease))
            except NotFound:
                # The process that had it before may have cancelled its own build, which was joined.
                if self._leases.alone or not await self._is_held(document_id, lease):
                    raise
                await asyncio.sleep(_RETRY_S)

    async def _is_held(self, document_id: str, lease: str) -> bool:
        async with self._db.reading() as uow:
            return bool(await uow.documents.held(lease, [document_id]))

    async def _attempt(self, document_id: str, lease: str) -> None:
        """Until the end, or until the database goes away: then the password is kept for the next one."""
        password = self._passwords.get(document_id)
        try:
            await self._ingestion.run(document_id, lease, lambda: self._passwords.pop(document_id, None))
        except DatabaseUnavailable:
            if password is not None:
                self._passwords[document_id] = password
            raise

    async def _remove_leftovers(self, ref: DocumentRef) -> None:
        """What was made of a document after another process had cancelled or removed it."""
        try:
            async with self._db.reading() as uow:
                row = await uow.documents.get(ref.document_id)
            if row is None or row.status in _ENDED_BADLY:
                await self._artifacts.remove(ref)
        except ServiceError as error:
            _log.warning("leftovers of a document stay", document_id=ref.document_id, exc_info=error)

    async def _fail(self, ref: DocumentRef, lease: str, code: str, detail: str) -> None:
        """Say why, give the bytes free to be uploaded again, and leave nothing else behind."""
        finish = partial(self.finish, ref.document_id, statuses.FAILED, code, detail, held_by=lease)
        if await _once_there_is_room(finish):
            _log.warning("document refused", document_id=ref.document_id, code=code)
            await _once_there_is_room(lambda: self._artifacts.remove(ref))

    async def finish(
        self, document_id: str, status: str, code: str, detail: str, *, held_by: str | None = None
    ) -> bool:
        """End an unfinished document as `failed` or `cancelled`; False when it had ended already, or another process
        than `held_by` works on it."""
        async with self._db.writing() as uow:
            changed = await uow.documents.change(
                document_id,
                only_if=statuses.UNFINISHED,
                held_by=held_by,
                status=status,
                lease_owner=None,
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
            async with self._db.writing(alone=False) as uow:
                await uow.documents.change(
                    document_id,
                    only_if=statuses.before(progress.stage),
                    held_by=self._leases.owner,
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
