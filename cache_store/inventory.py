"""Lists what a store holds and checks it, for an operator. Changes nothing."""

from dataclasses import dataclass
from pathlib import Path

from cache_store.area import Area
from cache_store.disk import names_in, tree_size
from cache_store.errors import CacheStoreError, MissReason, SnapshotMiss
from cache_store.keys import DIRECTORIES, EntryName, SnapshotKey, parse_flat
from cache_store.quarantine import read_note
from cache_store.reader import SnapshotReader
from cache_store.stored import read_stored_manifest


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One snapshot directory. `state`: `published`, `building` or `quarantined`.

    `reason` is why it was quarantined. `n_tokens` (of resident rows and slots the rows), `kv_type`, `created_at` and
    `n_segments` are those of a readable manifest, else None.
    """

    name: EntryName
    state: str
    nbytes: int
    n_tokens: int | None = None
    kv_type: str | None = None
    created_at: float | None = None
    reason: str | None = None
    n_segments: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking every byte of one published snapshot."""

    name: EntryName
    nbytes: int
    reason: MissReason | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.reason is None


def published(area: Area, key: SnapshotKey | None = None) -> list[EntryName]:
    """Names of all published snapshots, or of those of one key. Names that are none of ours are left out."""
    if key is not None:
        return _named(key, names_in(area.snapshots.joinpath(*key.parts)))
    found: list[EntryName] = []
    for owner in names_in(area.snapshots):
        for kind, directory in DIRECTORIES.items():
            for snapshot_id in names_in(area.snapshots / owner / directory):
                try:
                    one = SnapshotKey(owner, kind, snapshot_id)
                except ValueError:
                    continue
                found += published(area, one)
    return found


def entries(area: Area) -> list[EntryInfo]:
    """Everything in the store: published, building, quarantined."""
    found = [_published_entry(area, name) for name in published(area)]
    for state, path, name in _set_apart(area):
        note = read_note(area, name) if state == "quarantined" else None
        reason = None if note is None else note.reason
        found.append(EntryInfo(name, state, tree_size(path)[1], reason=reason))
    return found


def held_keys(area: Area) -> set[SnapshotKey]:
    """Keys of which the store holds anything. Under the store's lock nothing moves meanwhile."""
    return {name.key for name in published(area)} | {name.key for _, _, name in _set_apart(area)}


def verify(area: Area, name: EntryName) -> Verdict:
    """Read and check every byte of a published snapshot."""
    nbytes = tree_size(area.published(name))[1]
    try:
        with SnapshotReader(area.snapshots, name, check_only=True) as reader:
            reader.verify_all()
    except SnapshotMiss as miss:
        return Verdict(name, nbytes, miss.reason, miss.detail)
    return Verdict(name, nbytes)


def _set_apart(area: Area) -> list[tuple[str, Path, EntryName]]:
    """State, directory and name of what is not published."""
    found: list[tuple[str, Path, EntryName]] = []
    for state, directory in (("building", area.building), ("quarantined", area.quarantine)):
        for flat in names_in(directory):
            name = parse_flat(flat)
            if name is not None and "." not in flat:
                found.append((state, directory / flat, name))
    return found


def _named(key: SnapshotKey, digests: list[str]) -> list[EntryName]:
    names: list[EntryName] = []
    for digest in digests:
        try:
            names.append(EntryName(key, digest))
        except ValueError:
            continue
    return names


def _published_entry(area: Area, name: EntryName) -> EntryInfo:
    nbytes = tree_size(area.published(name))[1]
    try:
        manifest = read_stored_manifest(area.snapshots, name)
    except CacheStoreError:
        return EntryInfo(name, "published", nbytes)
    return EntryInfo(
        name,
        "published",
        nbytes,
        n_tokens=manifest.n_tokens,
        kv_type=str(manifest.layout.kv_type),
        created_at=manifest.created_at,
        n_segments=manifest.segments.n_segments(manifest.n_tokens),
    )
