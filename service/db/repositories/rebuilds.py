"""Documents whose snapshot was made with another fingerprint than the one that is served now."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.models import DocumentRow, SessionDocumentRow, TurnRow
from service.db.repositories.rows import changed

STALE = "stale"
"""The `snapshot_state` of a document that is to be rebuilt in the background."""


@dataclass(frozen=True, slots=True)
class Outdated:
    """A ready document with an old snapshot. `used_at`: its last question, else its upload (Unix time)."""

    id: str
    title: str
    n_tokens: int
    fingerprint: str | None
    used_at: float


class Rebuilds:
    """Ready documents by the fingerprint of their snapshot, those asked about last first."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def fingerprints(self) -> set[str]:
        """Digests of all fingerprints that ready documents have a snapshot of."""
        query = select(DocumentRow.snapshot_fingerprint).where(DocumentRow.status == "ready").distinct()
        return {digest for digest in await self._session.scalars(query) if digest is not None}

    async def outdated(self, fresh: Collection[str]) -> Sequence[Outdated]:
        """Those of another fingerprint than these."""
        return await self._select(_other_than(fresh))

    async def wanted(self, fresh: str) -> Sequence[Outdated]:
        """Those that are to be rebuilt, also where a rebuild was cut short."""
        cut = and_(DocumentRow.snapshot_state == "absent", _other_than([fresh]))
        return await self._select(or_(DocumentRow.snapshot_state == STALE, cut))

    async def mark(self, ids: Collection[str]) -> int:
        """Ask for the rebuild of these; how many can be. What is being rebuilt already is left alone."""
        states = ("ready", "absent", STALE)
        query = update(DocumentRow).where(DocumentRow.id.in_(ids), DocumentRow.snapshot_state.in_(states))
        return await changed(self._session, query.values(snapshot_state=STALE))

    async def claim(self, document_id: str) -> bool:
        """Take a document to rebuild it; False when another process was first."""
        query = update(DocumentRow).where(
            DocumentRow.id == document_id, DocumentRow.snapshot_state.in_((STALE, "absent"))
        )
        return await changed(self._session, query.values(snapshot_state="rebuilding")) == 1

    async def _select(self, condition: ColumnElement[bool]) -> Sequence[Outdated]:
        asked = (
            select(SessionDocumentRow.document_id, func.max(TurnRow.created_at).label("at"))
            .join(TurnRow, TurnRow.session_id == SessionDocumentRow.session_id)
            .group_by(SessionDocumentRow.document_id)
            .subquery()
        )
        used_at = func.coalesce(asked.c.at, DocumentRow.created_at).label("used_at")
        query = (
            select(
                DocumentRow.id, DocumentRow.title, DocumentRow.token_count, DocumentRow.snapshot_fingerprint, used_at
            )
            .outerjoin(asked, asked.c.document_id == DocumentRow.id)
            .where(DocumentRow.status == "ready", condition)
            .order_by(used_at.desc(), DocumentRow.id)
        )
        rows = (await self._session.execute(query)).all()
        return [Outdated(id, title, n_tokens or 0, digest, at) for id, title, n_tokens, digest, at in rows]


def _other_than(digests: Collection[str]) -> ColumnElement[bool]:
    digest = DocumentRow.snapshot_fingerprint
    return and_(digest.is_not(None), digest.not_in(digests))
