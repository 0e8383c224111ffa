"""The way of one document from its file to its snapshot: parse, tokenize, prefill, persist."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ingest.model import Document
from service.core import statuses
from service.core.builds import build_snapshot
from service.core.chats.texts import OURS, plain_document, text_digest
from service.core.clock import Clock
from service.core.files import Files
from service.core.policies import Policies
from service.core.progress import BuildStages, Meter, ProgressBoard
from service.core.prompts import Prompts
from service.core.quotas import count_tokens
from service.core.retention import Policy
from service.core.snapshots import snapshot_columns, token_columns
from service.core.tokens import SnapshotTokens, stored_document, tokenize_document, unpack
from service.db.engine import Database
from service.db.models import DocumentRow, PageRow
from service.engine.messages import BuildProgress, DocumentRef
from service.engine.protocol import EngineClient
from service.errors import NotFound


class Read(Protocol):
    """Reads the file at `path` into pages (`ingest.sandbox.parse` within its limits); raises IngestError."""

    async def __call__(
        self, path: Path, *, password: str | None, on_progress: Callable[[int, int], None]
    ) -> Document: ...


@dataclass(slots=True)
class Ingestion:
    """Takes up a document wherever its row says it is. `parsing` bounds how many are parsed at once,
    `building` how many are built: two would only share an engine.
    """

    db: Database
    engine: EngineClient
    prompts: Prompts
    files: Files
    read: Read
    board: ProgressBoard
    clock: Clock
    policies: Policies
    parsing: asyncio.Semaphore
    building: asyncio.Semaphore

    async def run(self, document_id: str, lease: str, take_password: Callable[[], str | None]) -> None:
        """Bring a document to `ready`, for the process `lease` that works on it. The password is asked for when parsing
        begins, and not kept.

        Raises ServiceError or IngestError with what the document's owner must know.
        """
        row = await self._row(document_id, lease)
        if row.status in {statuses.QUEUED, statuses.PARSING}:
            async with self.parsing:
                token_ids, policy = await self._parse(row, take_password())
        else:
            token_ids, policy = await self._stored_tokens(row)
        async with self.building:
            await self._build(row, token_ids, policy)

    async def _row(self, document_id: str, lease: str) -> DocumentRow:
        async with self.db.reading() as uow:
            row = await uow.documents.get(document_id)
        if row is None or row.lease_owner != lease:
            raise NotFound("The document was removed, or another process has taken it over.")
        return row

    async def _parse(self, row: DocumentRow, password: str | None) -> tuple[list[int], Policy]:
        await self._move(row, statuses.PARSING)
        meter = Meter(self.clock, statuses.PARSING, "pages")

        def report(done: int, total: int) -> None:
            self.board.publish(row.id, meter.at(done, total))

        path = self.files.path(row.id)
        if row.purpose in OURS:
            document = await plain_document(path)
        else:
            document = await self.read(path, password=password, on_progress=report)
        return await self._store_text(row, document)

    async def _stored_tokens(self, row: DocumentRow) -> tuple[list[int], Policy]:
        async with self.db.reading() as uow:
            packed = await uow.documents.token_ids(row.id)
            pages = await uow.pages.all(row.id)
        if packed is not None and row.template_digest == self.prompts.digest:
            return unpack(packed), await self._stored_policy(row)
        return await self._store_text(row, stored_document(row, pages))

    async def _stored_policy(self, row: DocumentRow) -> Policy:
        policy = self.policies.of(row)
        async with self.db.writing() as uow:
            moved = await uow.documents.change(
                row.id, only_if=statuses.UNFINISHED, held_by=row.lease_owner, policy=policy.stored()
            )
            _require(moved)
        return policy

    async def _store_text(self, row: DocumentRow, document: Document) -> tuple[list[int], Policy]:
        tokens = await tokenize_document(document, self.prompts)
        policy = self.policies.choose(row, len(tokens.ids))
        rows = _page_rows(row.id, document, tokens)
        async with self.db.writing() as uow:
            moved = await uow.documents.change(
                row.id,
                only_if=statuses.UNFINISHED,
                held_by=row.lease_owner,
                snapshot_state="building",
                page_count=len(rows),
                media_type=str(document.media_type),
                warnings=list(document.warnings),
                text_digest=text_digest(page.text for page in rows),
                policy=policy.stored(),
                **token_columns(tokens),
            )
            _require(moved)
            await uow.pages.replace(row.id, rows)
        return tokens.ids, policy

    async def _build(self, row: DocumentRow, token_ids: list[int], policy: Policy) -> None:
        stages = BuildStages(self.clock, is_compacted=policy.summary_tokens > 0)

        def report(event: BuildProgress) -> None:
            progress = stages.at(event.stage, event.done, event.total)
            if progress is not None:
                self.board.publish(row.id, progress)

        if row.status in statuses.before(statuses.PREFILLING):
            await self._move(row, statuses.PREFILLING)
        report(BuildProgress(statuses.PREFILLING, 0, len(token_ids)))
        ref = DocumentRef(row.owner_id, row.id)
        done = await build_snapshot(self.engine, ref, token_ids, policy.retention, report)
        await self._move(row, statuses.READY, lease_owner=None, **snapshot_columns(done, self.engine))
        async with self.db.writing() as uow:
            await count_tokens(uow, row.owner_id, done.prefilled_tokens, self.clock.now())

    async def _move(self, row: DocumentRow, status: str, **values: Any) -> None:
        """The claim of a stage: it fails when the document was cancelled, removed or taken over meanwhile."""
        allowed = statuses.UNFINISHED if status == statuses.READY else statuses.before(status)
        values |= {"status": status, "updated_at": self.clock.now()}
        async with self.db.writing(alone=False) as uow:
            _require(await uow.documents.change(row.id, only_if=allowed, held_by=row.lease_owner, **values))
        self.board.wake(row.id)


def _page_rows(document_id: str, document: Document, tokens: SnapshotTokens) -> list[PageRow]:
    ranges = {page.number: (page.token_start, page.token_end) for page in tokens.pages}
    return [
        PageRow(
            document_id=document_id,
            number=page.number,
            label=page.label,
            text=page.text,
            token_start=ranges[page.number][0],
            token_end=ranges[page.number][1],
        )
        for page in document.pages
    ]


def _require(moved: bool) -> None:
    if not moved:
        raise NotFound("The document was cancelled, removed or taken over.")
