"""The journal of a build: which blocks are durable. Append-only, each line with its own checksum.

A line is ``<xxh3-64, 16 hex digits> <json>``. The first says what is being built and must match byte for
byte for the journal to be taken up again; each further one holds the record checksums of the next block.
A torn or damaged line ends the journal: what stands before it is valid.

That of an encrypted build says in its second line how the tokens were sealed, has the tags of each block, and a line
for each time that the build was taken up.
"""

import os
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from cache_store.disk import Disk, read_into
from cache_store.manifest import SEAL_TAG_NBYTES, Sealed, SealedRun

_LIMIT = 64 << 20
T = TypeVar("T")


class BlockLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`checksums`: little-endian xxh3-64 of the block's record of each layer. `tags`: of an encrypted one, in the same
    order."""

    block: int
    checksums: bytes
    tags: bytes = b""


def _line(body: bytes) -> bytes:
    return b"%s %s\n" % (xxhash.xxh3_64_hexdigest(body).encode(), body)


class Journal:
    """An open journal. `checksums` has an array of one xxh3-64 per layer for each block recorded. Of an encrypted build
    `sealed` is how it began, `tags` has those of each block, and `runs` are the times it was taken up."""

    def __init__(self, path: Path, fd: int, disk: Disk, end: int, sealed: Sealed | None = None) -> None:
        self.path = path
        self.checksums: list[npt.NDArray[np.uint64]] = []
        self.tags: list[bytes] = []
        self.runs: list[SealedRun] = []
        self.sealed = sealed
        self._fd = fd
        self._disk = disk
        self._ends = [end]

    @classmethod
    def create(cls, path: Path, subject: bytes, disk: Disk, sealed: Sealed | None = None) -> "Journal":
        """A new journal of a build described by `subject` (JSON without line breaks)."""
        fd = disk.create(path, 0)
        head = _line(subject) + (b"" if sealed is None else _line(msgspec.json.encode(sealed)))
        disk.write_at(fd, head, 0)
        disk.sync_data(fd)
        return cls(path, fd, disk, len(head), sealed)

    @classmethod
    def load(
        cls, path: Path, subject: bytes, n_layers: int, disk: Disk, *, is_sealed: bool = False
    ) -> "Journal | None":
        """The journal at `path`; None when there is none, or it is of another build."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        data = bytearray(min(os.fstat(fd).st_size, _LIMIT))
        data = bytes(data[: read_into(fd, memoryview(data), 0)])
        head = _line(subject)
        lines = data[len(head) :].splitlines(keepends=True)
        sealed = _decoded(lines[0], Sealed) if is_sealed and lines else None
        if not data.startswith(head) or is_sealed != (sealed is not None):
            os.close(fd)
            return None
        end = len(head) + (len(lines.pop(0)) if is_sealed else 0)
        journal = cls(path, fd, disk, end, sealed)
        for line in lines:
            if not journal._take(line, n_layers):
                break
        return journal

    def add(self, checksums: npt.NDArray[np.uint64], tags: bytes = b"") -> None:
        """Record the next block, whose records are durable already."""
        body = msgspec.json.encode(BlockLine(len(self.checksums), checksums.astype("<u8").tobytes(), tags))
        self._append(_line(body))
        self.checksums.append(checksums)
        self.tags.append(tags)

    def go_on(self, run: SealedRun) -> None:
        """Record that the next blocks are sealed with another salt."""
        line = _line(msgspec.json.encode(run))
        self._append(line)
        self._ends[-2:] = self._ends[-1:]

    def keep(self, n_blocks: int) -> None:
        """Forget all blocks after the first `n_blocks`, and whatever stands behind them in the file."""
        del self.checksums[n_blocks:], self.tags[n_blocks:], self._ends[n_blocks + 1 :]
        self._disk.truncate(self._fd, self._ends[-1])

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, line: bytes) -> None:
        self._disk.write_at(self._fd, line, self._ends[-1])
        self._disk.sync_data(self._fd)
        self._ends.append(self._ends[-1] + len(line))

    def _take(self, line: bytes, n_layers: int) -> bool:
        """Take in a line that was read; False where the journal ends before it."""
        if self.sealed is not None and (run := _decoded(line, SealedRun)) is not None:
            # One that was cut before its first block has sealed nothing.
            self.runs = [one for one in self.runs if one.first_block != run.first_block]
            self.runs.append(run)
            self._ends[-1] += len(line)
            return True
        entry = _decoded(line, BlockLine)
        n_tags = 0 if self.sealed is None else SEAL_TAG_NBYTES * n_layers
        if entry is None or entry.block != len(self.checksums):
            return False
        if (len(entry.checksums), len(entry.tags)) != (8 * n_layers, n_tags):
            return False
        self.checksums.append(np.frombuffer(entry.checksums, "<u8"))
        self.tags.append(entry.tags)
        self._ends.append(self._ends[-1] + len(line))
        return True


def _decoded(line: bytes, kind: type[T]) -> T | None:
    """What a whole line says; None when it says something else."""
    body = line[17:-1]
    if _line(body) != line:
        return None
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError:
        return None
