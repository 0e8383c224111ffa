"""Changes of documents that other processes work on: asked of the database, for those that somebody waits for."""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from service.core.background import Background
from service.core.progress import ProgressBoard
from service.db.engine import Database
from service.errors import DatabaseUnavailable

WATCH_S = 0.5
_log = structlog.get_logger("preread.watching")


class RowWatch(Background):
    """Wakes who waits on the board when a row has changed. Asks once per `WATCH_S` for all of them, and not at all for
    documents of which `is_here` says that this process works on them."""

    def __init__(self, db: Database, board: ProgressBoard, is_here: Callable[[str], bool]) -> None:
        self._db = db
        self._board = board
        self._is_here = is_here
        self._seen: dict[str, tuple[Any, ...] | None] = {}

    async def look(self) -> None:
        """Wake for what changed since the last look. What is new is woken once: it may have changed in between."""
        ids = [id for id in self._board.waited_for() if not self._is_here(id)]
        before, self._seen = self._seen, {}
        if not ids:
            return
        async with self._db.reading() as uow:
            marks = await uow.documents.marks(ids)
        self._seen = {id: marks.get(id) for id in ids}
        for id, mark in self._seen.items():
            if id not in before or before[id] != mark:
                self._board.wake(id)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self.look()
            except DatabaseUnavailable:
                continue
            except Exception as error:
                _log.error("rows were not watched", exc_info=error)
