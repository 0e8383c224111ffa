"""What of the snapshot store the server process itself touches: what is deleted, and where things are. Everything else
is the engine's."""

from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path

from cache_store.errors import StorageFailed
from cache_store.keys import SnapshotKey
from cache_store.tiers.opening import TierConfig, open_store
from cache_store.tiers.store import TieredStore
from service.core.artifacts import Place
from service.errors import StorageFull
from service.settings import Settings


class StoredSnapshots:
    """The snapshots below the store's root, shared with the engine's process, and in the tiers beyond.

    Raises TierSettings for tiers that cannot be opened.
    """

    def __init__(self, root: Path, tiers: TierConfig | None = None) -> None:
        self._store = open_store(root, tiers or TierConfig(), uploads=False)

    def delete(self, owner_id: str, kind: str, id: str) -> dict[str, tuple[int, int]]:
        """Objects and bytes that each tier had. Raises StorageFull when the disk does not even let go of files; trying
        again goes on."""
        key, store = SnapshotKey(owner_id, kind, id), self._store
        try:
            removed = store.delete_by_tier(key) if isinstance(store, TieredStore) else {"disk": store.delete(key)}
        except StorageFailed as error:
            raise StorageFull(f"A snapshot could not be removed: {error}. Delete it again.") from error
        return {tier: (part.objects, part.nbytes) for tier, part in removed.items()}

    def turns(self) -> list[tuple[str, str]]:
        """Owner and id of every turn whose KV is stored, unfinished ones too."""
        keys = {entry.name.key for entry in self._store.entries() if entry.state != "quarantined"}
        return sorted((key.owner_id, key.id) for key in keys if key.kind == "turn")

    def places(self, owner_id: str, document_id: str) -> dict[str, Place]:
        """Tiers beyond the disk that have a document's snapshot, or get it."""
        if not isinstance(self._store, TieredStore):
            return {}
        key = SnapshotKey(owner_id, "document", document_id)
        known_at = self._store.known_at(key)
        return {tier: Place(state, known_at.get(tier)) for tier, state in self._store.far_places(key).items()}

    def left_disk(self, owner_id: str, document_id: str) -> bool:
        """Whether a document's snapshot was evicted from the disk and has not come back."""
        return self._store.is_evicted(SnapshotKey(owner_id, "document", document_id))

    def pin(self, owner_id: str, document_id: str, pinned: bool) -> None:
        """Keep a document's snapshot from being evicted, or no longer. Raises StorageFull."""
        with _storage_full("A document could not be pinned"):
            self._store.pin(SnapshotKey(owner_id, "document", document_id), pinned)

    def pin_only(self, documents: Collection[tuple[str, str]]) -> None:
        """Keep those of these documents, and no others. Raises StorageFull."""
        wanted = {SnapshotKey(owner_id, "document", document_id) for owner_id, document_id in documents}
        with _storage_full("Documents could not be pinned"):
            for key in self._store.marks.pinned_keys() | wanted:
                self._store.pin(key, key in wanted)

    def finish_removals(self) -> int:
        """Remove what was deleted while a tier was down; how much is left to do."""
        return self._store.finish_removals() if isinstance(self._store, TieredStore) else 0


@contextmanager
def _storage_full(what: str) -> Generator[None]:
    try:
        yield
    except StorageFailed as error:
        raise StorageFull(f"{what}: {error}.") from error


def tier_config(settings: Settings) -> TierConfig:
    """The tiers that the settings name."""
    return TierConfig(
        redis_url=settings.redis_url,
        redis_budget_nbytes=settings.redis_budget_bytes or None,
        redis_ttl_s=settings.redis_ttl_s,
        object_url=settings.object_url,
        object_budget_nbytes=settings.object_budget_bytes or None,
        encryption_key_file=settings.encryption_key_file,
    )
