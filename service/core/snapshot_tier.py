"""What of the snapshot store the server process itself touches: what is deleted. Everything else is the engine's."""

from pathlib import Path

from cache_store.errors import StorageFailed
from cache_store.keys import SnapshotKey
from cache_store.store import SnapshotStore
from service.errors import StorageFull


class StoredSnapshots:
    """The snapshots below the store's root, shared with the engine's process."""

    def __init__(self, root: Path) -> None:
        self._store = SnapshotStore(root)

    def delete(self, owner_id: str, kind: str, id: str) -> tuple[int, int]:
        """Raises StorageFull when the disk does not even let go of files; trying again goes on."""
        try:
            removed = self._store.delete(SnapshotKey(owner_id, kind, id))
        except StorageFailed as error:
            raise StorageFull(f"A snapshot could not be removed: {error}. Delete it again.") from error
        return removed.objects, removed.nbytes

    def turns(self) -> list[tuple[str, str]]:
        """Owner and id of every turn whose KV is stored, unfinished ones too."""
        keys = {entry.name.key for entry in self._store.entries() if entry.state != "quarantined"}
        return sorted((key.owner_id, key.id) for key in keys if key.kind == "turn")
