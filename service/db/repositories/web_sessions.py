"""Browsers that signed in."""

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.people import WebSessionRow


class WebSessions:
    """Rows of `web_sessions`."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, row: WebSessionRow) -> None:
        self._session.add(row)
        await self._session.flush()

    async def get(self, session_id: str) -> WebSessionRow | None:
        return await self._session.scalar(select(WebSessionRow).where(WebSessionRow.id == session_id))

    async def remove(self, session_id: str) -> None:
        await self._session.execute(delete(WebSessionRow).where(WebSessionRow.id == session_id))

    async def remove_expired(self, now: float) -> None:
        """Of everybody."""
        await self._session.execute(delete(WebSessionRow).where(WebSessionRow.expires_at <= now))
