"""The journal of a build: which blocks are durable. Append-only, each line with its own checksum.

A line is ``<xxh3-64, 16 hex digits> <json>``. The first says what is being built and must match byte for
byte for the journal to be taken up again; each further one holds the record checksums of the next block.
A torn or damaged line ends the journal: what stands before it is valid.
"""

import os
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from cache_store.disk import Disk, read_into

_LIMIT = 64 << 20


class BlockLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`checksums`: little-endian xxh3-64 of the block's record of each layer."""

    block: int
    checksums: bytes


def _line(body: bytes) -> bytes:
    return b"%s %s\n" % (xxhash.xxh3_64_hexdigest(body).encode(), body)


class Journal:
    """An open journal. `checksums` has an array of one xxh3-64 per layer for each block recorded."""

    def __init__(self, path: Path, fd: int, disk: Disk, checksums: list[npt.NDArray[np.uint64]], end: int):
        self.path = path
        self.checksums = checksums
        self._fd = fd
        self._disk = disk
        self._ends = [end]

    @classmethod
    def create(cls, path: Path, subject: bytes, disk: Disk) -> "Journal":
        """A new journal of a build described by `subject` (JSON without line breaks)."""
        fd = disk.create(path, 0)
        head = _line(subject)
        disk.write_at(fd, head, 0)
        disk.sync_data(fd)
        return cls(path, fd, disk, [], len(head))

    @classmethod
    def load(cls, path: Path, subject: bytes, n_layers: int, disk: Disk) -> "Journal | None":
        """The journal at `path`; None when there is none, or it is of another build."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        data = bytearray(min(os.fstat(fd).st_size, _LIMIT))
        data = bytes(data[: read_into(fd, memoryview(data), 0)])
        head = _line(subject)
        if not data.startswith(head):
            os.close(fd)
            return None
        journal = cls(path, fd, disk, [], len(head))
        for line in data[len(head) :].splitlines(keepends=True):
            checksums = _parsed(line, len(journal.checksums), n_layers)
            if checksums is None:
                break
            journal.checksums.append(checksums)
            journal._ends.append(journal._ends[-1] + len(line))
        return journal

    def add(self, checksums: npt.NDArray[np.uint64]) -> None:
        """Record the next block, whose records are durable already."""
        body = msgspec.json.encode(BlockLine(len(self.checksums), checksums.astype("<u8").tobytes()))
        self._append(_line(body))
        self.checksums.append(checksums)

    def keep(self, n_blocks: int) -> None:
        """Forget all blocks after the first `n_blocks`, and whatever stands behind them in the file."""
        del self.checksums[n_blocks:], self._ends[n_blocks + 1 :]
        self._disk.truncate(self._fd, self._ends[-1])

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, line: bytes) -> None:
        self._disk.write_at(self._fd, line, self._ends[-1])
        self._disk.sync_data(self._fd)
        self._ends.append(self._ends[-1] + len(line))


def _parsed(line: bytes, block: int, n_layers: int) -> npt.NDArray[np.uint64] | None:
    body = line[17:-1]
    if _line(body) != line:
        return None
    try:
        entry = msgspec.json.decode(body, type=BlockLine)
    except msgspec.DecodeError:
        return None
    if entry.block != block or len(entry.checksums) != 8 * n_layers:
        return None
    return np.frombuffer(entry.checksums, "<u8")
