"""Taking in a file: the same bytes with the same settings are one document, also when they come at once."""

import asyncio
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from ingest.errors import EmptyDocument, IngestError
from ingest.sniff import sniff
from service.core.audit import record
from service.core.chats.texts import BLANK, INLINE, OURS
from service.core.clock import Clock
from service.core.deletion import EXPIRE, Deletion, expired
from service.core.files import Files, IncomingFile
from service.core.ids import new_id
from service.core.jobs import Jobs
from service.core.leases import Leases
from service.core.policies import Policies
from service.core.quotas import Quotas
from service.core.repeats import Repeat
from service.core.wishes import Wish, parse_wish
from service.db.engine import Database
from service.db.errors import AlreadyExists
from service.db.models import DocumentRow
from service.engine.messages import DocumentRef
from service.errors import CommitUnknown, Invalid, Unsupported

MAX_TITLE_CHARS = 300
MAX_TTL_S = 10 * 366 * 24 * 3600
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class UploadSettings:
    """What came with a file. `filename` is shown to people and never part of a path, `retention` as `parse_wish` reads
    it. `purpose` is the row's."""

    filename: str = ""
    title: str = ""
    password: str | None = None
    retention: str = ""
    ttl_s: int | None = None
    visibility: str = "private"
    purpose: str = ""


class Uploads:
    """`begin` an upload, write to the file it gives, then `complete` it; or discard the file."""

    def __init__(
        self,
        db: Database,
        files: Files,
        jobs: Jobs,
        deletion: Deletion,
        policies: Policies,
        clock: Clock,
        leases: Leases,
        quotas: Quotas | None = None,
    ) -> None:
        self._quotas = quotas or Quotas()
        self._db = db
        self._files = files
        self._jobs = jobs
        self._deletion = deletion
        self._policies = policies
        self._clock = clock
        self._leases = leases

    def begin(self, announced_nbytes: int | None) -> tuple[str, IncomingFile]:
        """A new document id and the file for its bytes. Raises TooLarge, StorageFull."""
        document_id = new_id("doc")
        return document_id, self._files.begin(document_id, announced_nbytes)

    async def complete(
        self,
        owner_id: str,
        document_id: str,
        file: IncomingFile,
        settings: UploadSettings,
        *,
        repeat_key: str | None = None,
    ) -> tuple[DocumentRow, bool]:
        """The document and whether it is new: the same bytes with the same settings, or the same upload with the same
        `repeat_key`, make none. Raises Invalid, Unsupported, LimitReached, StorageFull."""
        check_settings(settings)
        wish = parse_wish(settings.retention)
        self._policies.check(wish)
        media_type = await asyncio.to_thread(_sniff, file.head)
        await file.finish()
        await self._leases.require()
        row = self._row(owner_id, document_id, file, settings, wish, media_type)
        repeat = None
        if repeat_key is not None:
            repeat = Repeat("upload", owner_id, repeat_key, row.dedupe_key, row.title, row.filename)
        while True:
            existing = await self._existing(row, repeat)
            if existing is not None:
                file.discard()
                return await self._uploaded(existing, row), False
            if await self._insert(row, file, repeat):
                self._jobs.submit(row, settings.password)
                return row, True

    async def take(
        self, owner_id: str, chunks: Iterable[bytes], settings: UploadSettings, *, repeat_key: str | None = None
    ) -> tuple[DocumentRow, bool]:
        """Take in what is here already, as `begin` and `complete` do. Whatever goes wrong, nothing is left of it."""
        document_id, file = self.begin(None)
        try:
            waiting = iter(chunks)
            while (chunk := await asyncio.to_thread(next, waiting, None)) is not None:
                await file.write(chunk)
            return await self.complete(owner_id, document_id, file, settings, repeat_key=repeat_key)
        finally:
            file.discard()

    async def _existing(self, row: DocumentRow, repeat: Repeat | None) -> DocumentRow | None:
        async with self._db.reading() as uow:
            made = await repeat.target(uow) if repeat else None
            existing = await uow.documents.get(made, row.owner_id) if made else None
            existing = existing or await uow.documents.by_dedupe_key(row.owner_id, row.dedupe_key)
        if existing is not None and expired(existing, self._clock.now()):
            await self._deletion.delete(existing.owner_id, existing.id, action=EXPIRE)
            return None
        return existing

    async def _uploaded(self, existing: DocumentRow, row: DocumentRow) -> DocumentRow:
        """What had come inside a chat's request, and is uploaded now, is a document as others are: it does not go with
        the chats."""
        if existing.purpose == INLINE and row.purpose != INLINE:
            values = {name: getattr(row, name) for name in ("purpose", "title", "filename", "expires_at", "updated_at")}
            async with self._db.writing() as uow:
                await uow.documents.change(existing.id, **values)
            for name, value in values.items():
                setattr(existing, name, value)
        return existing

    async def _insert(self, row: DocumentRow, file: IncomingFile, repeat: Repeat | None) -> bool:
        """False when the same upload was faster: the unique key decides."""
        file.keep()
        try:
            async with self._db.writing() as uow:
                if row.purpose != BLANK:
                    await self._quotas.check_upload(uow, row.owner_id, row.nbytes, row.created_at)
                await uow.documents.add(row)
                if repeat is not None:
                    await repeat.target(uow)  # once more, with nobody else writing: two may have come at once
                    await repeat.keep(uow, row.id, row.created_at)
                await record(uow, row.created_at, row.owner_id, "upload", row.id)
        except AlreadyExists:
            file.unkeep()
            return False
        except CommitUnknown:
            self._jobs.unsure(DocumentRef(row.owner_id, row.id))
            raise
        except BaseException:
            self._files.remove(row.id)
            raise
        return True

    def _row(
        self,
        owner_id: str,
        document_id: str,
        file: IncomingFile,
        settings: UploadSettings,
        wish: Wish,
        media_type: str,
    ) -> DocumentRow:
        now = self._clock.now()
        filename = display_name(settings.filename)
        return DocumentRow(
            id=document_id,
            owner_id=owner_id,
            dedupe_key=dedupe_key(file.sha256, wish.key, settings.purpose),
            title=settings.title.strip() or filename,
            filename=filename,
            media_type=media_type,
            nbytes=file.nbytes,
            sha256=file.sha256,
            visibility=settings.visibility,
            purpose=settings.purpose,
            retention=wish.stored(),
            lease_owner=self._leases.owner,
            created_at=now,
            updated_at=now,
            expires_at=None if settings.ttl_s is None else now + settings.ttl_s,
        )


def dedupe_key(sha256: str, retention: str, purpose: str = "") -> str:
    """Names bytes and the settings that change their snapshot. What the server wrote itself is read in another way, and
    goes unused: a file with the same bytes is another document."""
    named = f"sha256={sha256}\x1fretention={retention}" + (f"\x1fpurpose={purpose}" if purpose in OURS else "")
    return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()


def display_name(filename: str) -> str:
    """The last part of a file name without what terminals and pages trip over; never empty."""
    name = PurePosixPath(filename.replace("\\", "/")).name
    return _UNPRINTABLE.sub("", name).strip(" .")[-MAX_TITLE_CHARS:] or "document"


def check_settings(settings: UploadSettings) -> None:
    """Raises Invalid with the name of the field."""
    check_title(settings.title)
    check_ttl(settings.ttl_s)
    check_visibility(settings.visibility)


def check_title(title: str) -> None:
    if len(title) > MAX_TITLE_CHARS or _UNPRINTABLE.search(title):
        raise Invalid(f"A title has at most {MAX_TITLE_CHARS} printable characters.", param="title")


def check_ttl(ttl_s: int | None) -> None:
    if ttl_s is not None and not 1 <= ttl_s <= MAX_TTL_S:
        raise Invalid(f"ttl_s is {ttl_s}; it must be from 1 to {MAX_TTL_S} seconds.", param="ttl_s")


def check_visibility(visibility: str) -> None:
    if visibility != "private":
        raise Invalid("`private` is the only visibility this version knows.", param="visibility")


def _sniff(head: bytes) -> str:
    try:
        return str(sniff(head))
    except EmptyDocument as error:
        raise Invalid(str(error), code=error.code, param="file") from None
    except IngestError as error:
        raise Unsupported(str(error), code=error.code, param="file") from None
