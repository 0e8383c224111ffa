"""The stored KV of turns: removed when no turn refers to it any more."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

import structlog

from service.db.engine import Database

_log = structlog.get_logger("preread.turns")


class TurnStore(Protocol):
    """The part of the snapshot store that turns need; blocking."""

    def delete(self, owner_id: str, kind: str, id: str) -> dict[str, tuple[int, int]]:
        """Remove every copy of a `turn`'s KV: objects and bytes of each tier. Nothing there is fine."""
        ...

    def turns(self) -> list[tuple[str, str]]:
        """Owner and id of every turn whose KV is stored, unfinished ones too."""
        ...


class TurnKV:
    """Removes KV of turns off the event loop. A failure is logged, and made good by `sweep` at the next
    start."""

    def __init__(self, store: TurnStore, database: Database) -> None:
        self._store = store
        self._database = database

    async def delete(self, owner_id: str, kv_ids: Sequence[str]) -> None:
        if not kv_ids:
            return
        try:
            await asyncio.to_thread(self._delete, [(owner_id, kv_id) for kv_id in kv_ids])
        except Exception as error:
            _log.error("turn KV not removed", n=len(kv_ids), error=type(error).__name__, exc_info=error)

    async def sweep(self) -> None:
        """Remove stored KV that no turn refers to (left by a crash). What cannot be removed stays for the
        next start."""
        try:
            stored = await asyncio.to_thread(self._store.turns)
            async with self._database.reading() as uow:
                used = await uow.turns.kv_in_use()
            orphans = [(owner_id, kv_id) for owner_id, kv_id in stored if kv_id not in used]
            await asyncio.to_thread(self._delete, orphans)
        except Exception as error:
            _log.error("orphaned turns not removed", error=type(error).__name__, exc_info=error)

    def _delete(self, targets: Iterable[tuple[str, str]]) -> None:
        for owner_id, kv_id in targets:
            self._store.delete(owner_id, "turn", kv_id)
