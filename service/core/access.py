"""Sessions as their owner may use them: one with a document past its time is gone before the sweeper comes."""

from collections.abc import Sequence

from service.core.deletion import expired
from service.db.models import DocumentRow, SessionRow
from service.db.repositories import UnitOfWork
from service.errors import NotFound


async def usable_session(
    uow: UnitOfWork, owner_id: str, session_id: str, now: float
) -> tuple[SessionRow, Sequence[DocumentRow]]:
    """A session and its documents, in their order. Raises NotFound."""
    session = await uow.sessions.get(session_id, owner_id)
    rows = [await uow.documents.get(document_id) for document_id in session.document_ids] if session else []
    documents = [row for row in rows if row is not None and not expired(row, now)]
    if session is None or len(documents) < len(rows) or not documents:
        raise NotFound("There is no such session.")
    return session, documents
