"""What is uploaded: a path, an open file or bytes, read piece by piece, and how much of it has gone."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

OnSent = Callable[[int, int | None], None]
"""Takes the bytes that were sent and those that there are, None where that is not known beforehand."""


class Source:
    """A file as httpx reads it for a form. It begins where the file stands, also when it is sent again, and is as long
    as it is then: what a file that grows gets meanwhile is not sent."""

    def __init__(self, file: BinaryIO, filename: str, on_sent: OnSent | None = None) -> None:
        self.filename = filename.encode(errors="replace").decode()  # a name on a disk need not be UTF-8
        self._file = file
        self._on_sent = on_sent
        self.is_rewindable = file.seekable()
        self._start = file.tell() if self.is_rewindable else 0
        self.nbytes = self._measure() if self.is_rewindable else None
        self._sent = 0

    def read(self, size: int = -1) -> bytes:
        if self.nbytes is not None:
            left = self.nbytes - self.tell()
            size = left if size < 0 else min(size, left)
        data = self._file.read(size)
        if isinstance(data, str):
            raise TypeError("Open the file in binary mode.")
        if size > 0 and not data and self.nbytes is not None:
            raise OSError(f"{self.filename} became shorter while it was sent. Send it again when it is written.")
        self._sent += len(data)
        if data and self._on_sent is not None:
            self._on_sent(self._sent, self.nbytes)
        return data

    def tell(self) -> int:
        self._require_rewindable()
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._require_rewindable()
        if whence == os.SEEK_END:
            offset, whence = offset + (self.nbytes or 0), os.SEEK_SET
        begin = self._start if whence == os.SEEK_SET else 0
        at = self._file.seek(begin + offset, whence) - self._start
        self._sent = at
        return at

    def _measure(self) -> int:
        end = self._file.seek(0, os.SEEK_END)
        self._file.seek(self._start)
        return end - self._start

    def _require_rewindable(self) -> None:
        if not self.is_rewindable:
            raise io.UnsupportedOperation("the file can be read once only")


@contextmanager
def opened(
    file: str | os.PathLike[str] | bytes | BinaryIO, filename: str | None, on_sent: OnSent | None
) -> Iterator[Source]:
    """A source over a path, bytes, or a file opened in binary mode, which stays open. Raises OSError."""
    if isinstance(file, str | os.PathLike):
        path = Path(file)
        with path.open("rb") as handle:
            yield Source(handle, filename or path.name, on_sent)
    elif isinstance(file, bytes | bytearray | memoryview):
        yield Source(io.BytesIO(file), filename or "document", on_sent)
    else:
        name = getattr(file, "name", None)
        yield Source(file, filename or (Path(name).name if isinstance(name, str) else "document"), on_sent)
