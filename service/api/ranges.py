"""A file with `Range`, `If-Range` and `ETag` (RFC 9110, 13 and 14); Litestar's own response has none."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from urllib.parse import quote

from litestar.exceptions import HTTPException
from litestar.response import Stream

CHUNK_NBYTES = 256 * 1024
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [first, last]."""

    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return self.last - self.first + 1


def parse_range(header: str | None, nbytes: int) -> ByteRange | None:
    """The one range asked for; None to send everything (no, several, or malformed ranges may be ignored).

    Raises ValueError when it lies outside the file.
    """
    match = _RANGE.fullmatch((header or "").replace(" ", ""))
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        length = min(int(match[2]), nbytes)
        first, last = nbytes - length, nbytes - 1
    else:
        first, last = int(match[1]), min(int(match[2] or nbytes), nbytes - 1)
        if match[2] and int(match[2]) < first:
            return None
    if first >= nbytes or last < first:
        raise ValueError(f"bytes {first}-{last} of {nbytes}")
    return ByteRange(first, last)


def file_response(
    path: Path, *, etag: str, media_type: str, filename: str, range_header: str | None, if_range: str | None
) -> Stream:
    """200 with all bytes, 206 with those asked for. Raises HTTPException (416) when there are none such."""
    nbytes = path.stat().st_size
    headers = {
        # Set here, because Litestar would claim UTF-8 for any text.
        "Content-Type": media_type,
        "Accept-Ranges": "bytes",
        "ETag": etag,
        "Content-Disposition": disposition(filename),
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "private, no-cache",
        "Content-Security-Policy": "sandbox; default-src 'none'",
    }
    try:
        wanted = parse_range(range_header, nbytes) if if_range in {None, etag} else None
    except ValueError:
        raise HTTPException(
            f"The range lies outside the file, which has {nbytes} bytes.",
            status_code=416,
            headers={"Content-Range": f"bytes */{nbytes}", "Accept-Ranges": "bytes"},
        ) from None
    sent = wanted or ByteRange(0, nbytes - 1)
    headers["Content-Length"] = str(sent.nbytes)
    if wanted is not None:
        headers["Content-Range"] = f"bytes {sent.first}-{sent.last}/{nbytes}"
    return Stream(_read(path, sent), status_code=206 if wanted else 200, headers=headers)


def disposition(filename: str) -> str:
    """`attachment` with the name as RFC 6266 writes it: an ASCII fallback, and UTF-8."""
    ascii_name = re.sub(r'[^\x20-\x7e]|["\\%/]', "_", filename)
    return f"attachment; filename=\"{ascii_name}\"; filename*=UTF-8''{quote(filename, safe='')}"


async def _read(path: Path, wanted: ByteRange) -> AsyncIterator[bytes]:
    left = wanted.nbytes
    file = await _opened(path)
    try:
        file.seek(wanted.first)
        while left:
            chunk = await asyncio.to_thread(file.read, min(CHUNK_NBYTES, left))
            if not chunk:
                return
            left -= len(chunk)
            yield chunk
    finally:
        file.close()


async def _opened(path: Path) -> BufferedReader:
    """A file to read; closed where its reader went away while a thread opened it."""
    opening = asyncio.ensure_future(asyncio.to_thread(path.open, "rb"))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close)
        raise


def _close(opening: "asyncio.Future[BufferedReader]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
