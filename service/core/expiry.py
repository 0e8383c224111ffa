"""Removes documents whose time is over, what a tier that was down missed, old records; tells again what is pinned."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from service.core.artifacts import Artifacts
from service.core.background import Background
from service.core.clock import Clock
from service.core.deletion import Deletion
from service.core.pins import settle_far_pins
from service.core.quotas import day_of
from service.core.repeats import KEPT_S
from service.db.engine import Database

_USAGE_DAYS = 40
_log = structlog.get_logger("preread.expiry")


class Sweeper(Background):
    """A background task that asks `Deletion` every `interval_s` seconds. Lines of the audit log are kept for
    `audit_s`."""

    def __init__(
        self,
        deletion: Deletion,
        artifacts: Artifacts,
        interval_s: float,
        db: Database,
        clock: Clock,
        audit_s: float,
        also: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        """`also`: what others have to remove then."""
        self._deletion = deletion
        self._artifacts = artifacts
        self._interval_s = interval_s
        self._db = db
        self._clock = clock
        self._audit_s = audit_s
        self._also = also

    async def _run(self) -> None:
        while True:
            try:
                await self._deletion.delete_expired()
                await self._deletion.finish_far()
                await self._forget_records()
                await settle_far_pins(self._db, self._artifacts)
                for remove in self._also:
                    await remove()
            except Exception as error:
                _log.error("expired documents were not removed", exc_info=error)
            await asyncio.sleep(self._interval_s)

    async def _forget_records(self) -> None:
        now = self._clock.now()
        async with self._db.writing(alone=False) as uow:
            await uow.records.forget(
                audit_before=now - self._audit_s, repeats_before=now - KEPT_S, usage_before=day_of(now) - _USAGE_DAYS
            )
