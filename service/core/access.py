"""Sessions as their owner may use them: one whose document is past its time is gone before the sweeper comes."""

from service.core.deletion import expired
from service.db.models import DocumentRow, SessionRow
from service.db.repositories import UnitOfWork
from service.errors import NotFound


async def usable_session(uow: UnitOfWork, owner_id: str, session_id: str, now: float) -> tuple[SessionRow, DocumentRow]:
    """A session and its document. Raises NotFound."""
    session = await uow.sessions.get(session_id, owner_id)
    document = await uow.documents.get(session.document_id) if session is not None else None
    if session is None or document is None or expired(document, now):
        raise NotFound("There is no such session.")
    return session, document
