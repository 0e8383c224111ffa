"""Pages of a document: normalized text and token ranges."""

from collections.abc import Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.models import PageRow


class Pages:
    """Rows of `pages`, numbered from 1."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def replace(self, document_id: str, rows: Sequence[PageRow]) -> None:
        """Put these pages in place of whatever an earlier try stored."""
        await self._session.execute(delete(PageRow).where(PageRow.document_id == document_id))
        self._session.add_all(rows)
        await self._session.flush()

    async def get(self, document_id: str, number: int) -> PageRow | None:
        return await self._session.get(PageRow, (document_id, number))

    async def all(self, document_id: str) -> Sequence[PageRow]:
        query = select(PageRow).where(PageRow.document_id == document_id).order_by(PageRow.number)
        return (await self._session.scalars(query)).all()

    async def ranges(self, document_id: str) -> list[tuple[int, int, int]]:
        """(number, token_start, token_end) of every page, in order."""
        columns = select(PageRow.number, PageRow.token_start, PageRow.token_end)
        rows = await self._session.execute(columns.where(PageRow.document_id == document_id).order_by(PageRow.number))
        return [(row.number, row.token_start, row.token_end) for row in rows]

    async def text_size(self, document_id: str) -> tuple[int, int]:
        """Pages, and the characters in them."""
        query = select(func.count(), func.coalesce(func.sum(func.length(PageRow.text)), 0))
        count, nchars = (await self._session.execute(query.where(PageRow.document_id == document_id))).one()
        return count, nchars

    async def set_ranges(self, document_id: str, ranges: Sequence[tuple[int, int, int]]) -> None:
        """(number, token_start, token_end) of pages tokenized again."""
        rows = {row.number: row for row in await self.all(document_id)}
        for number, start, end in ranges:
            rows[number].token_start, rows[number].token_end = start, end
        await self._session.flush()

    async def remove(self, document_id: str) -> None:
        await self._session.execute(delete(PageRow).where(PageRow.document_id == document_id))
