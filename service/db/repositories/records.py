"""What was done, how much of it, and what was asked for with an `Idempotency-Key`."""

from collections.abc import Sequence

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.people import AuditRow, RepeatRow, UsageRow
from service.db.repositories.rows import changed


class Records:
    """Rows of `audit`, `usage_days` and `idempotency_keys`."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, row: AuditRow | RepeatRow) -> None:
        self._session.add(row)
        await self._session.flush()

    async def audited(
        self, *, limit: int, since: float = 0.0, user_id: str | None = None, target: str | None = None
    ) -> Sequence[AuditRow]:
        """Newest first."""
        query = select(AuditRow).where(AuditRow.at >= since)
        if user_id is not None:
            query = query.where(AuditRow.user_id == user_id)
        if target is not None:
            query = query.where((AuditRow.target == target) | (AuditRow.other == target))
        return (await self._session.scalars(query.order_by(AuditRow.at.desc(), AuditRow.id.desc()).limit(limit))).all()

    async def repeated(self, owner_id: str, key: str) -> RepeatRow | None:
        query = select(RepeatRow).where(RepeatRow.owner_id == owner_id, RepeatRow.key == key)
        return await self._session.scalar(query)

    async def forget_repeat(self, owner_id: str, key: str) -> None:
        await self._session.execute(delete(RepeatRow).where(RepeatRow.owner_id == owner_id, RepeatRow.key == key))

    async def tokens(self, user_id: str, day: int) -> int:
        query = select(UsageRow.tokens).where(UsageRow.user_id == user_id, UsageRow.day == day)
        return await self._session.scalar(query) or 0

    async def add_tokens(self, user_id: str, day: int, tokens: int) -> None:
        """In a unit that is alone: nobody else adds a row meanwhile."""
        query = update(UsageRow).where(UsageRow.user_id == user_id, UsageRow.day == day)
        if not await changed(self._session, query.values(tokens=UsageRow.tokens + tokens)):
            self._session.add(UsageRow(user_id=user_id, day=day, tokens=tokens))
            await self._session.flush()

    async def forget(self, *, audit_before: float, repeats_before: float, usage_before: int) -> None:
        """Remove what is older."""
        await self._session.execute(delete(AuditRow).where(AuditRow.at < audit_before))
        await self._session.execute(delete(RepeatRow).where(RepeatRow.created_at < repeats_before))
        await self._session.execute(delete(UsageRow).where(UsageRow.day < usage_before))
