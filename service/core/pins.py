"""Pinned documents are never evicted: their rows say which these are, and every disk with snapshots has to know."""

import structlog

from service.core.artifacts import Artifacts
from service.db.engine import Database
from service.engine.messages import DocumentRef
from service.errors import StorageFull

_log = structlog.get_logger("preread.pins")


async def pinned_documents(db: Database) -> list[DocumentRef]:
    async with db.reading() as uow:
        return [DocumentRef(*pair) for pair in await uow.documents.pinned()]


async def settle_pins(db: Database, artifacts: Artifacts) -> None:
    """Mark what is pinned, here and on the disks of workers: at start, when marks may be of another time."""
    try:
        await artifacts.pin_only(await pinned_documents(db))
    except StorageFull as error:  # only what is evicted first depends on it
        _log.warning("pinned documents are not marked", exc_info=error)
    await settle_far_pins(db, artifacts)


async def settle_far_pins(db: Database, artifacts: Artifacts) -> None:
    """Mark it on the disks of workers; they are told of what has changed, and of all of it after Redis was emptied."""
    await artifacts.pin_elsewhere(lambda: pinned_documents(db))
