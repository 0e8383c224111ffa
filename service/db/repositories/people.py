"""Organizations, users and their keys."""

from collections.abc import Mapping, Sequence

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.people import KeyRow, OrganizationRow, UserRow
from service.db.repositories.rows import changed, insert


class People:
    """Rows of `organizations`, `users` and `api_keys`."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, row: OrganizationRow | UserRow | KeyRow) -> None:
        """Raises AlreadyExists when the id, or the name, is taken."""
        await insert(self._session, row, row.id)

    async def organization(self, name: str) -> OrganizationRow | None:
        return await self._session.scalar(select(OrganizationRow).where(OrganizationRow.name == name))

    async def user(self, organization_id: str, name: str) -> UserRow | None:
        query = select(UserRow).where(UserRow.organization_id == organization_id, UserRow.name == name)
        return await self._session.scalar(query)

    async def organization_of(self, user_id: str) -> str | None:
        """Id of a user's organization; None for a link."""
        return await self._session.scalar(select(UserRow.organization_id).where(UserRow.id == user_id))

    async def names(self, ids: Sequence[str]) -> dict[str, str]:
        """Of users and organizations, by id."""
        found: dict[str, str] = {}
        for table in (UserRow, OrganizationRow):
            rows = await self._session.execute(select(table.id, table.name).where(table.id.in_(ids)))
            found |= {row.id: row.name for row in rows}
        return found

    async def key(self, key_id: str) -> KeyRow | None:
        return await self._session.scalar(select(KeyRow).where(KeyRow.id == key_id))

    async def keys(self) -> Sequence[tuple[KeyRow, str, str]]:
        """Every key, oldest first, with the names of its user and organization."""
        query = (
            select(KeyRow, UserRow.name, OrganizationRow.name)
            .join(UserRow, UserRow.id == KeyRow.user_id)
            .join(OrganizationRow, OrganizationRow.id == UserRow.organization_id)
            .order_by(KeyRow.created_at, KeyRow.id)
        )
        return [(row[0], row[1], row[2]) for row in await self._session.execute(query)]

    async def is_any_key(self) -> bool:
        """Whether there has ever been a key: one that was revoked counts, or revoking the last would open all."""
        return await self._session.scalar(select(KeyRow.id).limit(1)) is not None

    async def revoke(self, key_id: str, now: float) -> bool:
        """False when there is no such key, or it was revoked before."""
        query = update(KeyRow).where(KeyRow.id == key_id, KeyRow.revoked_at.is_(None)).values(revoked_at=now)
        return await changed(self._session, query) == 1

    async def revoke_settings(self, now: float, *, but: str) -> None:
        """Revoke keys that the settings had before."""
        query = update(KeyRow).where(KeyRow.origin == "settings", KeyRow.id != but, KeyRow.revoked_at.is_(None))
        await changed(self._session, query.values(revoked_at=now))

    async def used(self, times: Mapping[str, float]) -> None:
        """When keys were used last."""
        for key_id, at in times.items():
            await changed(self._session, update(KeyRow).where(KeyRow.id == key_id).values(last_used_at=at))
