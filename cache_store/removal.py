"""Takes everything a store holds of one key off the disk."""

from cache_store.area import Area, Removed
from cache_store.disk import names_in
from cache_store.keys import SnapshotKey, flat_key


def discard_all(area: Area, key: SnapshotKey) -> Removed:
    """Remove a key's snapshots, builds, journals, quarantined copies and tombstone. Raises OSError."""
    paths = [area.snapshots.joinpath(*key.parts)]
    for directory in (area.building, area.quarantine):
        paths += [directory / name for name in names_in(directory) if name.startswith(flat_key(key) + "~")]
    removed = Removed()
    for path in paths:
        if "." in path.name:
            area.disk.remove(path)
        else:
            removed += area.discard(path)
    area.disk.remove(area.tombstone(key))
    return removed
