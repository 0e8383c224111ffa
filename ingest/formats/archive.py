"""ZIP containers (DOCX, EPUB), read in memory without believing what they say about themselves."""

import posixpath
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ingest.errors import ContentTooLarge, DamagedFile, Protected, UnsafeFile, UnsupportedType
from ingest.limits import ParseLimits
from ingest.model import MediaType
from ingest.sniff import ZIP_CONTENTS

_MAX_PARTS = 20_000
_MAX_RATIO = 250
"""Deflate reaches 1,032; the most repetitive tables that people make stay below 100."""
_RATIO_FROM_NBYTES = 1024 * 1024
_IS_ENCRYPTED = 0x1
_LEADS_OUT = re.compile(r"(?:^|[/\\])\.\.(?:[/\\]|$)|^[/\\]|^[A-Za-z]:|\\|\x00")
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, OSError, RuntimeError)


class Archive:
    """An open container whose list of parts has been checked. Nothing is ever written to the disk.

    Raises DamagedFile, UnsafeFile, Protected and ContentTooLarge when constructed.
    """

    def __init__(self, path: Path, limits: ParseLimits) -> None:
        self._limits = limits
        try:
            self._zip = zipfile.ZipFile(path)
        except _BROKEN:
            raise DamagedFile("its ZIP container cannot be read") from None
        self._parts = {part.filename: part for part in self._zip.infolist()}
        try:
            self._check(self._zip.infolist(), path.stat().st_size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._zip.close()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._parts)

    def read(self, name: str) -> bytes:
        """The part with this exact name. Raises KeyError, ContentTooLarge (above `markup_nbytes`), DamagedFile."""
        part = self._parts[name]
        if part.file_size > self._limits.markup_nbytes:
            raise ContentTooLarge("text in one part", part.file_size, self._limits.markup_nbytes)
        try:
            with self._zip.open(part) as unpacked:
                # Not all of it: a part may hold more than it says, which would be unpacked before it is cut off.
                return unpacked.read(max(part.file_size, 1))
        except _BROKEN:
            raise DamagedFile("one of its parts cannot be unpacked") from None

    def kind(self) -> MediaType:
        """What the parts make it, whatever the file is called. Raises UnsupportedType."""
        mimetype = self._mimetype()
        if mimetype.startswith(b"application/epub+zip") or "META-INF/container.xml" in self._parts:
            return MediaType.EPUB
        if any(name.startswith("word/") for name in self._parts):
            return MediaType.DOCX
        listing = mimetype + b"\n" + "\n".join(self._parts).encode(errors="replace")
        raise UnsupportedType(next((name for mark, name in ZIP_CONTENTS if mark in listing), "a ZIP archive"))

    def _mimetype(self) -> bytes:
        part = self._parts.get("mimetype")
        return self.read("mimetype").strip() if part is not None and part.file_size < 200 else b""

    def _check(self, parts: list[zipfile.ZipInfo], nbytes: int) -> None:
        if len(parts) > _MAX_PARTS:
            raise UnsafeFile(f"it is packed from more than {_MAX_PARTS:,} parts")
        if len(parts) != len(self._parts):
            raise UnsafeFile("two of its parts have the same name")
        for part in parts:
            _check_part(part)
        if sum(part.compress_size for part in parts) > nbytes:
            raise UnsafeFile("its parts overlap, as in a ZIP bomb")
        total = sum(part.file_size for part in parts)
        if total > self._limits.unpacked_nbytes:
            raise ContentTooLarge("packed contents", total, self._limits.unpacked_nbytes)


def _check_part(part: zipfile.ZipInfo) -> None:
    if part.flag_bits & _IS_ENCRYPTED:
        raise Protected("packed document")
    if part.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UnsafeFile("a part of it is packed in a way that no document of its kind uses")
    if _LEADS_OUT.search(part.orig_filename) or stat.S_ISLNK(part.external_attr >> 16):
        raise UnsafeFile("the name of a part leads out of the file")
    if part.file_size > _RATIO_FROM_NBYTES and part.file_size > _MAX_RATIO * max(1, part.compress_size):
        raise UnsafeFile("a part of it unpacks to more than 250 times its size, as in a ZIP bomb")


@contextmanager
def open_archive(path: Path, limits: ParseLimits) -> Iterator[Archive]:
    """The container at `path`. Raises what `Archive` raises."""
    archive = Archive(path, limits)
    try:
        yield archive
    finally:
        archive.close()


def resolve(base: str, target: str) -> str:
    """The name of the part that `target` names when it is said in the part `base`; "" when it leads out."""
    joined = target if target.startswith("/") else posixpath.join(posixpath.dirname(base), target)
    name = posixpath.normpath(joined).lstrip("/")
    return "" if name == ".." or name.startswith("../") else name
