"""Small JSON files of a model directory that have a `format_version`."""

import os
from pathlib import Path

import msgspec


class _Version(msgspec.Struct):
    format_version: int


def save_record(record: msgspec.Struct, path: Path) -> None:
    """Write the file, replacing an earlier one at once; durable when this returns."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def version_of(data: bytes) -> int:
    """The format version, read before any field is interpreted. Raises msgspec.DecodeError, UnicodeDecodeError."""
    return msgspec.json.decode(data, type=_Version).format_version
