"""Removes documents whose time is over, and what removals left in a tier that was down."""

import asyncio

import structlog

from service.core.background import Background
from service.core.deletion import Deletion

_log = structlog.get_logger("preread.expiry")


class Sweeper(Background):
    """A background task that asks `Deletion` every `interval_s` seconds."""

    def __init__(self, deletion: Deletion, interval_s: float) -> None:
        self._deletion = deletion
        self._interval_s = interval_s

    async def _run(self) -> None:
        while True:
            try:
                await self._deletion.delete_expired()
                await self._deletion.finish_far()
            except Exception as error:
                _log.error("expired documents were not removed", exc_info=error)
            await asyncio.sleep(self._interval_s)
