"""What is known of snapshots beside their bytes: when and how often each was used, which are pinned, and with which
fingerprint this store is served. Small files, for all processes; only what is evicted, and when, depends on them.

<root>/uses/<flat name>     a byte for each use; the time of its last change is that of the last use
<root>/pins/<flat key>      a document that stays
<root>/served               the digest of the fingerprint whose snapshots can be used
<root>/served-draft         that of the draft model's, or "none"
"""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cache_store.area import Area
from cache_store.disk import names_in, replace_text, storage_errors
from cache_store.keys import EntryName, SnapshotKey, flat_key, parse_flat, parse_flat_key

MOST_USES = 4096
"""More are not told apart."""
_DIGEST = re.compile(r"[0-9a-f]{16}")
_NO_DRAFT = "none"
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class Use:
    """How often a snapshot was used, the making of it included, and when last (Unix seconds)."""

    n: int
    at: float


class Marks:
    """The marks of one store."""

    def __init__(self, area: Area) -> None:
        self._area = area
        self._served = area.root / "served"
        self._served_draft = area.root / "served-draft"

    def path(self, name: EntryName) -> Path:
        """The file that counts the uses of a snapshot."""
        return self._area.uses / name.flat

    def used(self, name: EntryName) -> None:
        """Count a use. What cannot be written is left out."""
        path = self.path(name)
        with suppress(OSError):
            fd = os.open(path, _APPEND, 0o600)
            try:
                if os.fstat(fd).st_size < MOST_USES:
                    os.write(fd, b".")
                else:
                    os.utime(fd)
            finally:
                os.close(fd)

    def use_of(self, name: EntryName) -> Use:
        """Of a snapshot without a mark, which an earlier version made: once, when it was written."""
        try:
            status = self.path(name).stat()
            return Use(max(1, status.st_size), status.st_mtime)
        except OSError:
            pass
        try:
            return Use(1, self._area.published(name).stat().st_mtime)
        except OSError:
            return Use(1, 0.0)

    def pin(self, key: SnapshotKey, pinned: bool) -> None:
        """Keep a key's snapshots from being evicted, or no longer. Raises StorageFailed."""
        path = self._area.pins / flat_key(key)
        with storage_errors("pinning a snapshot"):
            if pinned:
                path.touch(mode=0o600)
            else:
                path.unlink(missing_ok=True)

    def is_pinned(self, key: SnapshotKey) -> bool:
        return (self._area.pins / flat_key(key)).exists()

    def pinned_keys(self) -> set[SnapshotKey]:
        return {key for flat in names_in(self._area.pins) if (key := parse_flat_key(flat)) is not None}

    @property
    def served(self) -> str | None:
        """The digest of the fingerprint whose snapshots can be used; None where no engine has said so yet."""
        digest = _text_of(self._served)
        return digest if _DIGEST.fullmatch(digest) else None

    @property
    def served_draft(self) -> str | None:
        """As `served`, of what a draft model reads; "" where there is none."""
        digest = _text_of(self._served_draft)
        return "" if digest == _NO_DRAFT else digest if _DIGEST.fullmatch(digest) else None

    def serve(self, digest: str, draft_digest: str = "") -> None:
        """Say which fingerprint's snapshots can be used from now on, and which draft model's, "" for none. What cannot
        be written is left out."""
        for path, text in ((self._served, digest), (self._served_draft, draft_digest or _NO_DRAFT)):
            if text != _text_of(path):
                with suppress(OSError):
                    replace_text(path, text)

    def sweep(self) -> None:
        """Remove marks of uses of what is not there. Others may use the store meanwhile: a mark that is lost costs a
        snapshot no more than its place in the order."""
        for flat in names_in(self._area.uses):
            name = parse_flat(flat)
            if name is None or not os.path.lexists(self._area.published(name)):
                self._area.disk.remove(self._area.uses / flat)


def _text_of(path: Path) -> str:
    """The empty text for what cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
