"""Uploaded originals: one private file per document, named by its id and nothing else.

A file is written as `<id>.part`, flushed, and renamed before its row is written; whatever has no row is
removed at start.
"""

import asyncio
import errno
import hashlib
import os
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from service.errors import StorageFull, TooLarge

HEAD_NBYTES = 64 * 1024
_FLUSH_NBYTES = 1 << 20
_PART = ".part"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Files:
    """The folder of originals. `check_free(nbytes)` raises StorageFull when that much more is too much."""

    def __init__(self, root: Path, *, max_nbytes: int, check_free) -> None:
        self._root = root
        self._max_nbytes = max_nbytes
        self._check_free = check_free

    def path(self, document_id: str) -> Path:
        return self._root / document_id

    def begin(self, document_id: str, announced_nbytes: int | None = None) -> "IncomingFile":
        """Take in a new original. Raises TooLarge or StorageFull before anything is written."""
        if announced_nbytes is not None and announced_nbytes > self._max_nbytes:
            raise too_large(self._max_nbytes)
        self._check_free(announced_nbytes or 0)
        return IncomingFile(self.path(document_id), self._max_nbytes, self._check_free)

    def remove(self, document_id: str) -> int | None:
        """Remove an original; its size, or None when there is none."""
        path = self.path(document_id)
        try:
            nbytes = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return None
        return nbytes

    def sweep(self, known: Collection[str], *, older_than_s: float = 0.0) -> int:
        """Remove what no row names, if it has not been written to for so long: uploads cut short by a crash. Gives how
        many."""
        unknown = [path for path in self._root.iterdir() if path.is_file() and path.name not in known]
        old = [path for path in unknown if not older_than_s or time.time() - path.stat().st_mtime > older_than_s]
        for path in old:
            path.unlink(missing_ok=True)
        return len(old)


def too_large(max_nbytes: int) -> TooLarge:
    return TooLarge(f"The file is larger than this server takes ({max_nbytes:,} bytes): upload a smaller one.")


class IncomingFile:
    """A file on its way in. Either `keep` it, or `discard` it: then nothing is left."""

    def __init__(self, path: Path, max_nbytes: int, check_free) -> None:
        self._path = path
        self._max_nbytes = max_nbytes
        self._check_free = check_free
        self._hash = hashlib.sha256()
        self._pending = bytearray()
        self._file = os.fdopen(os.open(self._part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb", 0)
        self.nbytes = 0
        self.head = b""

    @property
    def _part(self) -> Path:
        return self._path.with_name(self._path.name + _PART)

    @property
    def sha256(self) -> str:
        """Of all bytes, once `finish` was awaited."""
        return self._hash.hexdigest()

    async def write(self, data: bytes) -> None:
        """Raises TooLarge as soon as the limit is passed, StorageFull when the disk refuses."""
        self.nbytes += len(data)
        if self.nbytes > self._max_nbytes:
            raise too_large(self._max_nbytes)
        if len(self.head) < HEAD_NBYTES:
            self.head += data[: HEAD_NBYTES - len(self.head)]
        self._pending += data
        if len(self._pending) >= _FLUSH_NBYTES:
            await asyncio.to_thread(self._flush)

    async def finish(self) -> None:
        """Everything is on the disk, still under its temporary name."""
        await asyncio.to_thread(self._flush, True)

    def keep(self) -> None:
        """Give the file its name, durably."""
        self._file.close()
        os.rename(self._part, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def unkeep(self) -> None:
        """Take the name back: another document has these bytes."""
        os.rename(self._path, self._part)

    def discard(self) -> None:
        with suppress(OSError):
            self._file.close()
        self._part.unlink(missing_ok=True)

    def _flush(self, sync: bool = False) -> None:
        pending, self._pending = self._pending, bytearray()
        try:
            self._check_free(len(pending))
            self._hash.update(pending)
            view = memoryview(pending)
            while view:
                view = view[self._file.write(view) or 0 :]
            if sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            if error.errno in _FULL:
                raise StorageFull("The disk refused the upload: free some space and try again.") from error
            raise
