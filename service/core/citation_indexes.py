"""Citation indexes of the documents asked most recently, within a memory budget."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from service.core.citations import Cited, PageIndex, PageText, cite
from service.core.citations.looks import attention_of
from service.db.engine import Database
from service.engine.messages import PieceLooks

DEFAULT_BUDGET_NBYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class JoinedPages:
    """The pages of one or several documents in one index, counted through; `places`: document, page and label of each;
    `tokens`: of each which document it is of, by its number, and its tokens [first, last) there.

    In one, so that a sentence of an answer goes to where it is said best, and words count by how rare they are in all.
    """

    index: PageIndex
    places: list[tuple[str, int, str | None]]
    tokens: list[tuple[int, int, int]]

    def cite(self, question: str, answer: str, pieces: Sequence[PieceLooks] = ()) -> Cited:
        looked = attention_of(pieces, self.tokens) if pieces else None
        found = cite(answer, self.index, document_id="", question=question, attention=looked)
        citations = [
            replace(citation, document_id=document_id, page=page, label=label)
            for citation in found.citations
            for document_id, page, label in [self.places[citation.page]]
        ]
        return replace(found, citations=citations)


class CitationIndexes:
    """Builds the index of a session's documents once, in a worker thread, and keeps the latest ones. Pages never
    change."""

    def __init__(self, database: Database, *, budget_nbytes: int = DEFAULT_BUDGET_NBYTES) -> None:
        self._database = database
        self._budget_nbytes = budget_nbytes
        self._kept: OrderedDict[tuple[str, ...], JoinedPages] = OrderedDict()
        self._locks: dict[tuple[str, ...], asyncio.Lock] = {}

    async def cite(
        self, document_ids: Sequence[str], question: str, answer: str, pieces: Sequence[PieceLooks] = ()
    ) -> Cited:
        """Citations of an answer from these documents (see `citations.cite`); `pieces`: where it looked, as the engine
        says."""
        pages = await self.pages_of(tuple(document_ids))
        return await asyncio.to_thread(pages.cite, question, answer, pieces)

    async def pages_of(self, document_ids: tuple[str, ...]) -> JoinedPages:
        lock = self._locks.setdefault(document_ids, asyncio.Lock())
        try:
            async with lock:
                pages = self._kept.pop(document_ids, None) or await self._build(document_ids)
                self._kept[document_ids] = pages
        finally:
            if not lock.locked():
                self._locks.pop(document_ids, None)
        self._shrink()
        return pages

    def forget(self, document_id: str) -> None:
        for document_ids in [ids for ids in self._kept if document_id in ids]:
            del self._kept[document_ids]

    async def _build(self, document_ids: tuple[str, ...]) -> JoinedPages:
        async with self._database.reading() as uow:
            rows = [row for document_id in document_ids for row in await uow.pages.all(document_id)]
        texts = [PageText(number, row.text) for number, row in enumerate(rows)]
        places = [(row.document_id, row.number, row.label) for row in rows]
        numbers = {document_id: number for number, document_id in enumerate(document_ids)}
        tokens = [(numbers[row.document_id], row.token_start or 0, row.token_end or 0) for row in rows]
        return JoinedPages(await asyncio.to_thread(PageIndex, texts), places, tokens)

    def _shrink(self) -> None:
        while len(self._kept) > 1 and sum(p.index.nbytes for p in self._kept.values()) > self._budget_nbytes:
            self._kept.popitem(last=False)
