"""An object store as the durable tier: S3, GCS, Azure, or a path, through obstore.

    <prefix>/<owner>/documents/<id>/<fingerprint>/manifest.json
    <prefix>/<owner>/documents/<id>/<fingerprint>/<generation>/shard-0000.safetensors

The objects are the files of a snapshot as they lie on disk. The manifest is put last and deleted first.
"""

import os
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import BaseError, UnknownConfigurationKeyError
from obstore.store import from_url

from cache_store.area import Removed
from cache_store.keys import DIRECTORIES, EntryName, SnapshotKey
from cache_store.manifest import MANIFEST_NAME
from cache_store.tiers.errors import TierDown, TierRefused, TierSettings
from cache_store.tiers.tier import Arrived, TierEntry, generation_of, silent

COUNT_S = 600.0
"""How long the bytes counted in a listing are trusted; what this process writes meanwhile is added."""
_KINDS = {directory: kind for kind, directory in DIRECTORIES.items()}
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
_CLIENT: dict[str, Any] = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=60)}
_RETRY: dict[str, Any] = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
}


class ObjectTier:
    """A `BlobTier`. `url`: `s3://bucket/prefix`, `gs://...`, `az://...`, `file:///path`. Credentials, region and
    endpoint come from the environment, as the store's own tools take them. `budget_nbytes` bounds the bytes there;
    nothing is removed to make room. Requests that fail (time-outs, 5xx) are repeated with growing pauses.

    Raises TierSettings for a URL that is none.
    """

    name = "object"
    durable = True
    n_streams = 4

    def __init__(
        self,
        url: str,
        *,
        budget_nbytes: int | None = None,
        client: dict[str, Any] | None = None,
        retry: dict[str, Any] | None = None,
    ) -> None:
        self._budget_nbytes = budget_nbytes
        self._counted: tuple[float, int] | None = None
        try:
            self._store: Any = _open(url, {**_CLIENT, **(client or {})}, {**_RETRY, **(retry or {})})
        except (BaseError, UnknownConfigurationKeyError, ValueError, OSError) as error:
            raise TierSettings(f"PREREAD_OBJECT_URL: {_first_line(error)}") from None

    def manifest(self, name: EntryName) -> bytes | None:
        with _failures(), suppress(FileNotFoundError):
            return bytes(obstore.get(self._store, _path(name, MANIFEST_NAME)).bytes())
        return None

    def read(self, name: EntryName, generation: str, shard: int, memory: memoryview, arrived: Arrived = silent) -> int:
        """The body goes to its place as it arrives."""
        with _failures(), suppress(FileNotFoundError):
            found = obstore.get(self._store, _shard_path(name, generation, shard))
            if found.meta["size"] != len(memory):
                return min(found.meta["size"], len(memory) + 1)
            at = 0
            for chunk in found.stream(min_chunk_size=4 << 20):
                part = memoryview(chunk)
                if at + len(part) > len(memory):
                    return len(memory) + 1
                memory[at : at + len(part)] = part
                at += len(part)
                arrived(at)
            if at != len(memory):
                raise TierDown(f"the object store sent {at} of {len(memory)} bytes")
            return at
        return 0

    def write(self, name: EntryName, manifest: bytes, nbytes: int, shards: Iterable[memoryview]) -> None:
        self._check_budget(nbytes + len(manifest))
        generation = generation_of(manifest)
        with _failures():
            for i, shard in enumerate(shards):
                obstore.put(self._store, _shard_path(name, generation, i), shard)
            obstore.put(self._store, _path(name, MANIFEST_NAME), manifest)
            self._count(nbytes + len(manifest))
            stale = [meta for meta in self._listed(_path(name)) if not _belongs(meta["path"], generation)]
            self._delete(stale)

    def touch(self, name: EntryName) -> None:
        """Nothing: the store keeps what it has."""

    def discard(self, name: EntryName) -> Removed:
        return self._remove(_path(name))

    def remove(self, key: SnapshotKey) -> Removed:
        return self._remove("/".join(key.parts))

    def entries(self) -> Iterator[TierEntry]:
        held: dict[EntryName, TierEntry] = {}
        with _failures():
            for meta in self._listed(""):
                name = _name_of(meta["path"])
                if name is not None:
                    held[name] = _merged(name, held.get(name), meta)
        yield from (held[name] for name in sorted(held))

    def used(self) -> int:
        with _failures():
            return sum(meta["size"] for meta in self._listed(""))

    def close(self) -> None:
        pass

    def _check_budget(self, nbytes: int) -> None:
        if self._budget_nbytes is None:
            return
        if self._counted is None or time.monotonic() - self._counted[0] > COUNT_S:
            self._counted = (time.monotonic(), self.used())
        if self._counted[1] + nbytes > self._budget_nbytes:
            raise TierRefused(
                f"{nbytes} bytes do not fit the object store: {self._counted[1]} of {self._budget_nbytes} are in use"
            )

    def _count(self, nbytes: int) -> None:
        if self._counted is not None:
            self._counted = (self._counted[0], self._counted[1] + nbytes)

    def _remove(self, prefix: str) -> Removed:
        with _failures():
            found = self._listed(prefix)
            # Manifests first: what is half removed must not be found.
            found.sort(key=lambda meta: not meta["path"].endswith("/" + MANIFEST_NAME))
            self._delete(found)
            removed = Removed(len(found), sum(meta["size"] for meta in found))
            self._count(-removed.nbytes)
            return removed

    def _listed(self, prefix: str) -> list[Any]:
        pages: Any = obstore.list(self._store, prefix or None)  # pyright: ignore[reportUnknownMemberType]
        return [meta for page in pages for meta in page]

    def _delete(self, found: list[Any]) -> None:
        manifests = [meta["path"] for meta in found if meta["path"].endswith("/" + MANIFEST_NAME)]
        shards = [meta["path"] for meta in found if not meta["path"].endswith("/" + MANIFEST_NAME)]
        for paths in (manifests, shards):
            try:
                if paths:
                    obstore.delete(self._store, paths)
            except FileNotFoundError:
                # Somebody else removes the same; a path stops at the first that is missing.
                for path in paths:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._store, path)


def _open(url: str, client: dict[str, Any], retry: dict[str, Any]) -> Any:
    make: Any = from_url
    scheme = url.partition("://")[0]
    if scheme == "file":
        if not url.partition("://")[2].strip("/"):
            raise ValueError(f"{url!r} names no directory, such as file:///srv/preread")
        return make(url, mkdir=True)
    if scheme == "memory":
        return make(url)
    if scheme not in ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "https"):
        raise ValueError(f"no object store has the address {url!r}: s3://, gs://, az:// and file:// are known")
    # Whoever names an endpoint without TLS wants that.
    plain = any(os.environ.get(variable, "").startswith("http://") for variable in _ENDPOINTS)
    return make(url, client_options={"allow_http": plain, **client}, retry_config=retry)


def _path(name: EntryName, *more: str) -> str:
    return "/".join((*name.parts, *more))


def _shard_path(name: EntryName, generation: str, shard: int) -> str:
    return _path(name, generation, f"shard-{shard:04d}.safetensors")


def _belongs(path: str, generation: str) -> bool:
    return path.endswith("/" + MANIFEST_NAME) or path.split("/")[-2] == generation


def _name_of(path: str) -> EntryName | None:
    parts = path.split("/")
    if len(parts) < 5 or parts[1] not in _KINDS:
        return None
    try:
        return EntryName(SnapshotKey(parts[0], _KINDS[parts[1]], parts[2]), parts[3])
    except ValueError:
        return None


def _merged(name: EntryName, entry: TierEntry | None, meta: Any) -> TierEntry:
    before = entry or TierEntry(name, 0, 0.0, complete=False)
    complete = before.complete or meta["path"].endswith("/" + MANIFEST_NAME)
    changed = max(before.changed_at or 0.0, meta["last_modified"].timestamp())
    return TierEntry(name, before.nbytes + meta["size"], changed, complete)


@contextmanager
def _failures() -> Generator[None]:
    """Every failure of the store as one of the tier."""
    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        raise TierDown(f"the object store: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
