"""The processes that share a database: whose work is whose, and who is still there."""

import time

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.models import ProcessRow
from service.db.repositories.rows import changed


class Processes:
    """Rows of `processes`. A row that is removed takes the leases of its process with it."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, process_id: str) -> None:
        self._session.add(ProcessRow(id=process_id, started_at=time.time()))
        await self._session.flush()

    async def beat(self, process_id: str) -> bool:
        """Count a sign of life. False: the process was given up."""
        query = update(ProcessRow).where(ProcessRow.id == process_id).values(beat=ProcessRow.beat + 1)
        return await changed(self._session, query) == 1

    async def beats(self) -> dict[str, int]:
        """How many signs of life each process has given."""
        rows = await self._session.execute(select(ProcessRow.id, ProcessRow.beat))
        return {row.id: row.beat for row in rows}

    async def remove(self, process_id: str, *, beat: int | None = None) -> bool:
        """Remove a process; with `beat`, only if it has given no other sign of life since."""
        query = delete(ProcessRow).where(ProcessRow.id == process_id)
        return await changed(self._session, query if beat is None else query.where(ProcessRow.beat == beat)) == 1

    async def remove_all(self) -> None:
        await self._session.execute(delete(ProcessRow))
