"""Citation indexes of the documents asked most recently, within a memory budget."""

import asyncio
from collections import OrderedDict

from service.core.citations import Citation, PageIndex, PageText, cite
from service.db.engine import Database

DEFAULT_BUDGET_NBYTES = 128 << 20


class CitationIndexes:
    """Builds a document's index once, in a worker thread, and keeps the latest ones. Pages never change."""

    def __init__(self, database: Database, *, budget_nbytes: int = DEFAULT_BUDGET_NBYTES) -> None:
        self._database = database
        self._budget_nbytes = budget_nbytes
        self._kept: OrderedDict[str, PageIndex] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}

    async def cite(self, document_id: str, question: str, answer: str) -> list[Citation]:
        """Citations of an answer from this document (see `citations.cite`)."""
        index = await self.index_of(document_id)
        return await asyncio.to_thread(cite, answer, index, document_id=document_id, question=question)

    async def index_of(self, document_id: str) -> PageIndex:
        lock = self._locks.setdefault(document_id, asyncio.Lock())
        try:
            async with lock:
                index = self._kept.pop(document_id, None) or await self._build(document_id)
                self._kept[document_id] = index
        finally:
            if not lock.locked():
                self._locks.pop(document_id, None)
        self._shrink()
        return index

    def forget(self, document_id: str) -> None:
        self._kept.pop(document_id, None)

    async def _build(self, document_id: str) -> PageIndex:
        async with self._database.reading() as uow:
            pages = [PageText(row.number, row.text) for row in await uow.pages.all(document_id)]
        return await asyncio.to_thread(PageIndex, pages)

    def _shrink(self) -> None:
        while len(self._kept) > 1 and sum(index.nbytes for index in self._kept.values()) > self._budget_nbytes:
            self._kept.popitem(last=False)
