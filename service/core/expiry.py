"""Removes documents whose time is over, and what removals left in a tier that was down."""

import asyncio

import structlog

from service.core.deletion import Deletion

_log = structlog.get_logger("preread.expiry")


class Sweeper:
    """A background task that asks `Deletion` every `interval_s` seconds."""

    def __init__(self, deletion: Deletion, interval_s: float) -> None:
        self._deletion = deletion
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            try:
                await self._deletion.delete_expired()
                await self._deletion.finish_far()
            except Exception as error:
                _log.error("expired documents were not removed", exc_info=error)
            await asyncio.sleep(self._interval_s)
