"""Everything a document leaves outside its rows, and how it is removed, tier by tier."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from service.core.files import Files
from service.engine.messages import DocumentRef
from service.engine.protocol import EngineClient, EngineLost, OwnDisks

_RELEASE_S = 20.0


@dataclass(frozen=True, slots=True)
class Removed:
    """Of one tier: `file`, `text`, `turns`, `host` (memory), `disk`, `redis`, `object` (snapshots and turns' KV)."""

    tier: str
    objects: int
    nbytes: int

    def __add__(self, other: "Removed") -> "Removed":
        return Removed(self.tier, self.objects + other.objects, self.nbytes + other.nbytes)


@dataclass(frozen=True, slots=True)
class Place:
    """Of a snapshot in a tier: `ready`, or `pending` while it is sent. `known_at`: when a tier beyond the disk was last
    seen to have it (Unix time); what happened there since shows when it is asked."""

    state: str
    known_at: float | None = None


class SnapshotTier(Protocol):
    """Stored snapshots as deletion sees them; blocking, safe while they are read."""

    def delete(self, owner_id: str, kind: str, id: str) -> dict[str, tuple[int, int]]:
        """Remove every copy of a `document`'s or `turn`'s KV, unfinished ones too: objects and bytes of each tier."""
        ...

    def places(self, owner_id: str, document_id: str) -> dict[str, Place]:
        """Tiers beyond the disk that have a document's snapshot, or get it. Fast: no tier is asked."""
        ...

    def left_disk(self, owner_id: str, document_id: str) -> bool:
        """Whether a document's snapshot was evicted from the disk and has not come back. Fast."""
        ...

    def pin(self, owner_id: str, document_id: str, pinned: bool) -> None:
        """Keep a document's snapshot from being evicted, or no longer. Raises StorageFull."""
        ...

    def pin_only(self, documents: Collection[tuple[str, str]]) -> None:
        """Keep those of these documents, pairs of owner and id, and no others. Raises StorageFull."""
        ...

    def finish_removals(self) -> int:
        """Remove what was deleted while a tier was down; how much is left to do."""
        ...

    def turns(self) -> list[tuple[str, str]]:
        """Owner and id of every turn whose KV is stored, unfinished ones too."""
        ...


class Artifacts:
    """Removes a document from the engine's memory, the snapshot store and the files, in this order: what
    could still write is stopped first."""

    def __init__(self, engine: EngineClient, store: SnapshotTier, files: Files) -> None:
        self._engine = engine
        self._store = store
        self._files = files

    async def remove(
        self, document: DocumentRef, *, kv_ids: Sequence[str] = (), session_ids: Sequence[str] = ()
    ) -> list[Removed]:
        """Remove whatever is there. Doing it again removes nothing and says so.

        A `kv_id` with an owner before it, `owner/id`, is in that one's part of the store.
        """
        host = await self._release(document, session_ids)
        snapshots = [("document", document.document_id), *(("turn", kv_id) for kv_id in kv_ids)]
        stored: dict[str, Removed] = {}
        for owner_id, theirs in _by_owner(document.owner_id, snapshots).items():
            elsewhere = await self._delete_elsewhere(owner_id, theirs)
            for part in [*elsewhere, *await asyncio.to_thread(self._delete, owner_id, theirs)]:
                stored[part.tier] = stored.get(part.tier, Removed(part.tier, 0, 0)) + part
        nbytes = await asyncio.to_thread(self._files.remove, document.document_id)
        return [Removed("file", int(nbytes is not None), nbytes or 0), host, *stored.values()]

    def places(self, document: DocumentRef) -> dict[str, Place]:
        """Tiers beyond the disk that have a document's snapshot, or get it."""
        return self._store.places(document.owner_id, document.document_id)

    def left_disk(self, document: DocumentRef) -> bool:
        """Whether a document's snapshot was evicted from the disk and has not come back."""
        return self._store.left_disk(document.owner_id, document.document_id)

    async def pin(self, document: DocumentRef, pinned: bool) -> None:
        """Keep a document's snapshot from being evicted, or no longer. Raises StorageFull."""
        await asyncio.to_thread(self._store.pin, document.owner_id, document.document_id, pinned)

    async def pin_only(self, documents: Sequence[DocumentRef]) -> None:
        """Keep those of these documents from being evicted, and no others. Raises StorageFull."""
        pairs = {(document.owner_id, document.document_id) for document in documents}
        await asyncio.to_thread(self._store.pin_only, pairs)

    async def pin_elsewhere(self, read: Callable[[], Awaitable[Sequence[DocumentRef]]]) -> None:
        """Keep what `read` gives on disks that only the engine reaches, and nothing else; without such, nothing is
        read."""
        if isinstance(self._engine, OwnDisks):
            await self._engine.pin_only(read)

    async def finish_removals(self) -> None:
        """Remove what was deleted while a tier was down."""
        await asyncio.to_thread(self._store.finish_removals)

    async def _release(self, document: DocumentRef, session_ids: Sequence[str]) -> Removed:
        try:
            async with asyncio.timeout(_RELEASE_S):
                released = await self._engine.release(document)
                for session_id in session_ids:
                    await self._engine.release_session(session_id)
        except (EngineLost, TimeoutError):
            # A lost engine holds no memory, and one that hangs is about to be lost.
            return Removed("host", 0, 0)
        return Removed("host", released.objects, released.nbytes)

    async def _delete_elsewhere(self, owner_id: str, snapshots: Sequence[tuple[str, str]]) -> list[Removed]:
        """From disks that only the engine reaches. Before what all reach: from them it would be sent there again."""
        if not isinstance(self._engine, OwnDisks):
            return []
        done = await self._engine.delete(owner_id, snapshots)
        return [Removed("disk", done.objects, done.nbytes)]

    def _delete(self, owner_id: str, snapshots: Sequence[tuple[str, str]]) -> list[Removed]:
        deleted = [self._store.delete(owner_id, kind, id) for kind, id in snapshots]
        return [Removed(tier, *counts) for tiers in deleted for tier, counts in tiers.items()]


def _by_owner(owner_id: str, snapshots: Sequence[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """Kinds and ids of snapshots by the owner in whose part of the store they are."""
    found: dict[str, list[tuple[str, str]]] = {}
    for kind, name in snapshots:
        owner, _, id = name.rpartition("/")
        found.setdefault(owner or owner_id, []).append((kind, id))
    return found
