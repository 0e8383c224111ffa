"""What start-up puts right before anything else happens: the traces of a process that was killed."""

import structlog

from service.core import statuses
from service.core.artifacts import Artifacts
from service.core.deletion import Deletion
from service.core.files import Files
from service.core.pins import settle_pins
from service.db.engine import Database
from service.engine.messages import DocumentRef
from service.errors import StorageFull

SHARED_AGE_S = 24 * 3600.0
_ENDED_BADLY = frozenset({statuses.FAILED, statuses.CANCELLED})
_log = structlog.get_logger("preread.recovery")


async def recover(db: Database, deletion: Deletion, artifacts: Artifacts, files: Files, *, alone: bool) -> None:
    """Finish deletions, clean up after failed documents, drop uploads without a row, settle states
    and pins."""
    await deletion.finish_all()
    async with db.reading() as uow:
        ended = await uow.documents.with_status(_ENDED_BADLY)
        known = await uow.documents.ids()
    # When a document fails its file goes last: one that is still there says that the clean-up was cut.
    for row in ended:
        if files.path(row.id).exists():
            try:
                await artifacts.remove(DocumentRef(row.owner_id, row.id))
            except StorageFull as error:  # the next start tries again
                _log.warning("leftovers of a document stay", document_id=row.id, exc_info=error)
    await settle_pins(db, artifacts)
    # Other processes take in uploads now: of theirs only what is old cannot be on its way.
    if n_swept := files.sweep(known, older_than_s=0.0 if alone else SHARED_AGE_S):
        _log.info("uploads without a document removed", count=n_swept)
    async with db.writing() as uow:
        await uow.documents.reset_snapshot_states({"building", "rebuilding"})
