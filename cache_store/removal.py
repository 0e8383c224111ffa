"""Takes everything a store holds of one key off the disk."""

from cache_store.area import Area, Removed
from cache_store.disk import names_in
from cache_store.keys import SnapshotKey, flat_key


def discard_all(area: Area, key: SnapshotKey) -> Removed:
    """Remove a key's snapshots, builds, journals, quarantined copies and marks. Raises OSError."""
    published = area.snapshots.joinpath(*key.parts)
    prefix = flat_key(key) + "~"
    paths, flats = [published], {prefix + digest for digest in names_in(published)}
    for directory in (area.building, area.quarantine):
        found = [name for name in names_in(directory) if name.startswith(prefix)]
        paths += [directory / name for name in found]
        flats |= {name.partition(".")[0] for name in found}
    removed = Removed()
    for path in paths:
        if "." in path.name:
            area.disk.remove(path)
        else:
            removed += area.discard(path)
    area.disk.remove(area.tombstone(key))
    area.disk.remove(area.pins / flat_key(key))
    for flat in flats:
        area.disk.remove(area.uses / flat)
    return removed
