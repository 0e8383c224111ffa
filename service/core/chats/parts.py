"""Files that come in parts: each part is a file of its own, until they are put together as a document."""

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from service.core.clock import Clock
from service.core.files import too_large
from service.core.ids import new_id
from service.core.quotas import Quotas
from service.core.uploads import Uploads, UploadSettings, check_ttl, display_name
from service.db.chats import UploadRow
from service.db.engine import Database
from service.db.models import DocumentRow
from service.db.repositories import UnitOfWork
from service.errors import Conflict, Invalid, LimitReached, NotFound, TooLarge

LIFE_S = 3600.0
MAX_PART_NBYTES = 64 << 20
MAX_PENDING = 16
MAX_PARTS = 4096
_READ_NBYTES = 1 << 20
_FORGET_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Announced:
    """What a file will be."""

    filename: str
    nbytes: int
    purpose: str
    expires_after_s: int | None = None


class PartUploads:
    """Uploads live for an hour. Their parts lie below `root`, on the disk of the process that took them."""

    def __init__(
        self,
        db: Database,
        uploads: Uploads,
        root: Path,
        clock: Clock,
        quotas: Quotas,
        *,
        max_nbytes: int,
        check_free: Callable[[int], None],
    ) -> None:
        self._db = db
        self._uploads = uploads
        self._root = root
        self._clock = clock
        self._quotas = quotas
        self._max_nbytes = max_nbytes
        self._check_free = check_free

    async def begin(self, owner_id: str, announced: Announced) -> UploadRow:
        """Raises Invalid, TooLarge, StorageFull, LimitReached."""
        if announced.nbytes < 1:
            raise Invalid("bytes must be at least 1.", param="bytes")
        if announced.nbytes > self._max_nbytes:
            raise too_large(self._max_nbytes)
        check_ttl(announced.expires_after_s)
        self._check_free(announced.nbytes)
        now = self._clock.now()
        row = UploadRow(
            id=new_id("upload"),
            owner_id=owner_id,
            filename=display_name(announced.filename),
            purpose=announced.purpose,
            nbytes=announced.nbytes,
            status="pending",
            parts=[],
            expires_after_s=announced.expires_after_s,
            created_at=now,
            expires_at=now + LIFE_S,
        )
        async with self._db.writing() as uow:
            await self._quotas.check_upload(uow, owner_id, announced.nbytes, now)
            if await uow.chats.pending_uploads(owner_id, now) >= MAX_PENDING:
                raise LimitReached(
                    f"{MAX_PENDING} uploads are open: complete or cancel one of them.",
                    code="too_many_uploads",
                    retry_after_s=60,
                )
            await uow.chats.add(row)
        return row

    async def add(self, owner_id: str, upload_id: str, chunks: AsyncIterator[bytes]) -> str:
        """Keep a part; its id. Raises NotFound, Conflict, TooLarge, StorageFull."""
        row = await self.require_pending(owner_id, upload_id)
        part_id = new_id("part")
        path = self._folder(row.id) / part_id
        try:
            nbytes = await self._write(path, chunks, row.nbytes - _n_so_far(row))
            async with self._db.writing() as uow:
                row = _require_pending(await uow.chats.upload(owner_id, upload_id), self._clock.now())
                if nbytes > row.nbytes - _n_so_far(row) or len(row.parts) >= MAX_PARTS:
                    raise TooLarge(f"The parts have more bytes than the {row.nbytes:,} that were announced.")
                row.parts = [*row.parts, [part_id, nbytes]]
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return part_id

    async def complete(
        self, owner_id: str, upload_id: str, part_ids: Sequence[str], md5: str | None = None
    ) -> tuple[UploadRow, DocumentRow]:
        """The parts, in this order, as a document. Raises NotFound, Conflict, Invalid, and as an upload does; the
        upload is open still then."""
        row = await self.require_pending(owner_id, upload_id)
        sizes: dict[str, int] = dict(row.parts)
        unknown = [part_id for part_id in part_ids if part_id not in sizes]
        if unknown or len(set(part_ids)) < len(part_ids):
            raise Invalid("part_ids names a part that this upload does not have, or one twice.", param="part_ids")
        total = sum(sizes[part_id] for part_id in part_ids)
        if total != row.nbytes:
            raise Invalid(f"The parts have {total:,} bytes; {row.nbytes:,} were announced.", param="part_ids")
        paths = [self._folder(row.id) / part_id for part_id in part_ids]
        if not all(_has(path, sizes[path.name]) for path in paths):
            raise Conflict("Parts of this upload are at another server: begin a new upload.", code="parts_elsewhere")
        if md5 is not None and md5.lower() != await asyncio.to_thread(_md5, paths):
            raise Invalid("The parts have another MD5 checksum.", param="md5")
        settings = UploadSettings(row.filename, ttl_s=row.expires_after_s, purpose=row.purpose)
        try:
            document, _ = await self._uploads.take(owner_id, _bytes_of(paths), settings)
        except FileNotFoundError:
            raise Conflict("The upload ended meanwhile: begin a new one.", code="upload_not_pending") from None
        return await self._end(owner_id, upload_id, "completed", document.id), document

    async def cancel(self, owner_id: str, upload_id: str) -> UploadRow:
        """Raises NotFound, Conflict."""
        await self.require_pending(owner_id, upload_id)
        return await self._end(owner_id, upload_id, "cancelled")

    async def clean(self) -> None:
        """Remove parts of uploads whose time is over, and in the end the uploads."""
        now = self._clock.now()
        # The folders first: an upload is known before its folder is there, and must not lose its first part.
        names = await asyncio.to_thread(lambda: set(os.listdir(self._root)) if self._root.is_dir() else set())
        async with self._db.reading() as uow:
            known = await uow.chats.uploads_with_parts(now)
        await asyncio.to_thread(self._sweep, names - known)
        async with self._db.writing(alone=False) as uow:
            await uow.chats.forget_uploads(now - _FORGET_S)

    async def require_pending(self, owner_id: str, upload_id: str) -> UploadRow:
        """An upload that takes parts. Raises NotFound, Conflict."""
        async with self._db.reading() as uow:
            return _require_pending(await uow.chats.upload(owner_id, upload_id), self._clock.now())

    async def _end(self, owner_id: str, upload_id: str, status: str, document_id: str | None = None) -> UploadRow:
        async with self._db.writing() as uow:
            row = await _upload(uow, owner_id, upload_id)
            row.status, row.document_id = status, document_id
        await asyncio.to_thread(shutil.rmtree, self._folder(row.id), ignore_errors=True)
        return row

    async def _write(self, path: Path, chunks: AsyncIterator[bytes], most: int) -> int:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        nbytes, most = 0, min(most, MAX_PART_NBYTES)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            async for chunk in chunks:
                nbytes += len(chunk)
                if nbytes > most:
                    raise TooLarge(f"A part has at most {MAX_PART_NBYTES:,} bytes, and all together those announced.")
                self._check_free(len(chunk))
                await asyncio.to_thread(file.write, chunk)
        return nbytes

    def _folder(self, upload_id: str) -> Path:
        return self._root / upload_id

    def _sweep(self, names: set[str]) -> None:
        for name in names:
            shutil.rmtree(self._root / name, ignore_errors=True)


async def _upload(uow: UnitOfWork, owner_id: str, upload_id: str) -> UploadRow:
    if (row := await uow.chats.upload(owner_id, upload_id)) is None:
        raise NotFound("There is no such upload.")
    return row


def _require_pending(row: UploadRow | None, now: float) -> UploadRow:
    if row is None:
        raise NotFound("There is no such upload.")
    status = "expired" if row.status == "pending" and row.expires_at <= now else row.status
    if status != "pending":
        raise Conflict(f"The upload is {status}: begin a new one.", code="upload_not_pending")
    return row


def _n_so_far(row: UploadRow) -> int:
    return sum(nbytes for _, nbytes in row.parts)


def _has(path: Path, nbytes: int) -> bool:
    """Whether a part is here, and whole: a machine that stopped may have lost some of it."""
    return path.is_file() and path.stat().st_size == nbytes


def _bytes_of(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(_READ_NBYTES):
                yield chunk


def _md5(paths: Sequence[Path]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for chunk in _bytes_of(paths):
        digest.update(chunk)
    return digest.hexdigest()
