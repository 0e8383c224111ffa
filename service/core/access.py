"""What somebody may reach: what is theirs, and what is shared with them. Everything else is not there.

`who` is the id of a user, or of a link. The database is asked the same whether there is such an id or not, and never
gives a row that may not be seen: so the refusal of another's takes as long as that of what does not exist. A document
past its time is gone before the sweeper comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from service.core.deletion import expired
from service.db.models import DocumentRow, SessionRow
from service.db.repositories import UnitOfWork
from service.errors import Forbidden, NotFound

READ, ASK, OWNER = "read", "ask", "owner"
_RANKS = {READ: 0, ASK: 1, OWNER: 2}
_NO_DOCUMENT, _NO_SESSION = "There is no such document.", "There is no such session."


@dataclass(frozen=True, slots=True)
class Reached:
    """A document and what may be done with it: `read`, `ask`, or all, as its `owner`."""

    row: DocumentRow
    access: str

    def require(self, need: str) -> DocumentRow:
        """The document. Raises Forbidden for less than `need`."""
        _require(self.access, need, "document")
        return self.row


async def reached_document(uow: UnitOfWork, who: str, document_id: str, now: float) -> Reached | None:
    """A document that they may see, expired or not."""
    shared = await uow.shares.document_access(who, document_id, now)
    row = await uow.documents.get(document_id, None if shared else who)
    return _reached(row, who, shared)


async def usable_document(uow: UnitOfWork, who: str, document_id: str, now: float, *, need: str) -> DocumentRow:
    """Raises NotFound, and Forbidden when it is shared for less than `need`."""
    found = await reached_document(uow, who, document_id, now)
    if found is None or expired(found.row, now):
        raise NotFound(_NO_DOCUMENT)
    return found.require(need)


async def usable_session(
    uow: UnitOfWork, who: str, session_id: str, now: float, *, need: str = READ, asking: bool = False
) -> tuple[SessionRow, Sequence[DocumentRow]]:
    """A session and its documents, in their order. Raises NotFound, also when one of the documents may not be seen any
    more, and Forbidden when the session is shared for less than `need`, or a document for reading only though it is
    for `asking`.

    Whoever a session is shared with may read it, and fork it (`ask`); only its `owner` may ask in it.
    """
    shared = await uow.shares.session_access(who, session_id, now)
    session = await uow.sessions.get(session_id, None if shared else who)
    found = [await _document_of(uow, who, each, now) for each in session.document_ids] if session else []
    documents = [each for each in found if each is not None and not expired(each.row, now)]
    if session is None or len(documents) < len(found) or not documents:
        raise NotFound(_NO_SESSION)
    _require(OWNER if session.owner_id == who else shared or READ, need, "session")
    return session, [document.require(ASK if asking else READ) for document in documents]


async def _document_of(uow: UnitOfWork, who: str, document_id: str, now: float) -> Reached | None:
    """Of a session that they may see: nothing is told by how long it takes."""
    row = await uow.documents.get(document_id, who)
    return Reached(row, OWNER) if row else await reached_document(uow, who, document_id, now)


def _reached(row: DocumentRow | None, who: str, shared: str | None) -> Reached | None:
    if row is None:
        return None
    return Reached(row, OWNER if row.owner_id == who else shared or READ)


def _require(access: str, need: str, what: str) -> None:
    if _RANKS[access] >= _RANKS[need]:
        return
    if need == ASK:
        raise Forbidden(f"The {what} is shared with you for reading, not for asking.", code="shared_for_reading")
    do = "; fork it to ask on" if what == "session" else ""
    raise Forbidden(f"The {what} is shared with you: only its owner can do this{do}.", code="not_owner")
