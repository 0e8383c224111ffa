"""Whether somebody who reads a stream may go on: what is revoked while it runs ends it before its next event."""

import time
from collections.abc import Awaitable, Callable

from service.core.access import READ, usable_document, usable_session
from service.core.clock import Clock
from service.core.keys import Keys, Principal
from service.db.engine import Database
from service.db.repositories import UnitOfWork
from service.errors import DatabaseUnavailable, NotFound

OWN_S = 1.0
"""A stream of what is one's own only ends with its key: that is looked at so often."""


class Permit:
    """Asked before every event. `every_s`: an answer is good for so long; 0 is for one event."""

    def __init__(self, check: Callable[[], Awaitable[bool]], every_s: float) -> None:
        self._check = check
        self._every_s = every_s
        self._good_until = time.monotonic() + every_s

    async def require(self) -> None:
        """Raises NotFound when it is not permitted any more."""
        if self._every_s and time.monotonic() < self._good_until:
            return
        try:
            permitted = await self._check()
        except DatabaseUnavailable:
            if not self._every_s:
                raise  # what is shared is not shown while nobody can say that it is
            permitted = True
        if not permitted:
            raise NotFound("It is not shared with you any more, or your key was revoked.")
        self._good_until = time.monotonic() + self._every_s


class Permits:
    """Makes permits of streams; None where there is nothing that could be revoked: on a server without keys."""

    def __init__(self, db: Database, keys: Keys, clock: Clock) -> None:
        self._db = db
        self._keys = keys
        self._clock = clock

    async def of_document(self, principal: Principal, document_id: str) -> Permit | None:
        """For the events of a document. Raises NotFound."""

        async def owners(uow: UnitOfWork, now: float) -> set[str]:
            return {(await usable_document(uow, principal.user_id, document_id, now, need=READ)).owner_id}

        return await self._permit(principal, owners)

    async def of_session(self, principal: Principal, session_id: str) -> Permit | None:
        """For the events of an answer. Raises NotFound."""

        async def owners(uow: UnitOfWork, now: float) -> set[str]:
            session, documents = await usable_session(uow, principal.user_id, session_id, now)
            return {session.owner_id, *(row.owner_id for row in documents)}

        return await self._permit(principal, owners)

    async def _permit(
        self, principal: Principal, owners: Callable[[UnitOfWork, float], Awaitable[set[str]]]
    ) -> Permit | None:
        """`owners`: whose it is, as long as they may see it; raises NotFound."""
        if principal.key_id is None:
            return None

        async def is_own() -> bool:
            async with self._db.reading() as uow:
                return await owners(uow, self._clock.now()) == {principal.user_id}

        async def check() -> bool:
            if not await self._keys.is_valid(principal):
                return False
            try:
                await is_own()
            except NotFound:
                return False
            return True

        return Permit(check, OWN_S if await is_own() else 0.0)
