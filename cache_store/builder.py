"""Builds one snapshot: blocks go to their final place as they come, publishing adds the manifest and renames.

Publish order: shards, fsync, manifest, fsync, rename, fsync. A document's build keeps a journal, so that
it goes on after a crash; a turn, resident rows or slots are written in one go and are not worth one.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cache_store.area import Area
from cache_store.disk import read_into, storage_errors
from cache_store.errors import MissReason, SnapshotMiss, StorageFailed
from cache_store.journal import Journal
from cache_store.keyring import KeyRing
from cache_store.keys import EntryName
from cache_store.lock import BuildLock
from cache_store.manifest import Canary, Manifest, encode_manifest
from cache_store.placement import move_into_place, reserve, write_manifest
from cache_store.sealing import Sealer
from cache_store.shards import Shard
from cache_store.subject import BuildSubject


class SnapshotBuilder:
    """Writes one snapshot; holds its one-writer lock. Made by `SnapshotStore.begin`.

    A context manager: leaving it without `publish` keeps the journal of a document and removes the rest.
    """

    def __init__(
        self,
        area: Area,
        subject: BuildSubject,
        lock: BuildLock,
        clock: Callable[[], float] = time.time,
        *,
        before_publish: Callable[[EntryName], None] = lambda _: None,
        after_publish: Callable[[EntryName], None] = lambda _: None,
        keys: KeyRing | None = None,
    ) -> None:
        """Take up an earlier build of the very same subject, or begin a new one. Raises BudgetExceeded,
        StorageFailed; the lock is the caller's until this returns. Others are told of a snapshot when it is about to
        become visible, and when it has. With `keys` everything is sealed before it is written."""
        self._area = area
        self._disk = area.disk
        self._subject = subject
        self._lock = lock
        self._clock = clock
        self._before_publish, self._after_publish = before_publish, after_publish
        self._geometry = subject.geometry()
        self._keys = keys
        self._sealer: Sealer | None = None
        self._directory = area.build(subject.name)
        self._fds: list[int] = []
        self._checksums: list[npt.NDArray[np.uint64]] = []
        self._journal: Journal | None = None
        self._published = False
        try:
            with storage_errors("beginning a snapshot"):
                if not self._taken_up():
                    self._start()
        except BaseException:
            self._close_files()
            raise

    @property
    def n_blocks(self) -> int:
        return self._geometry.n_blocks

    @property
    def n_blocks_done(self) -> int:
        """Blocks that are in place; for a document, durable and checked."""
        return len(self._checksums)

    def block_records(self, block: int) -> list[bytes]:
        """The records of a block in place, one per layer, checked. Raises SnapshotMiss for damage."""
        if not 0 <= block < self.n_blocks_done:
            raise IndexError(f"block {block} of {self.n_blocks_done}")
        return [self._read_record(shard, block, layer) for shard, layer in self._places(block)]

    def append(self, records: Sequence[bytes | memoryview]) -> None:
        """Write the next block: one record per layer. Durable on return, for a document.

        Raises ValueError for records that do not fit, StorageFailed when the disk refuses.
        """
        block = self.n_blocks_done
        self._check_records(block, records)
        geometry, tags = self._geometry, b""
        if self._sealer is not None:
            records, tags = self._sealer.records(block, records)
        with storage_errors("writing a block"):
            for shard, layer in self._places(block):
                offset = geometry.record_offset(shard, block, layer)
                self._disk.write_at(self._fds[shard.index], records[layer], offset)
            checksums = np.array([geometry.checksum(r, block, i) for i, r in enumerate(records)], np.uint64)
            if self._journal is not None:
                for shard in geometry.shards_of(block):
                    self._disk.sync_data(self._fds[shard.index])
                self._journal.add(checksums, tags)
        self._checksums.append(checksums)
        if self._sealer is not None:
            self._sealer.keep(tags)

    def publish(self, *, canary: Canary | None = None) -> Manifest:
        """Make the snapshot visible, whole and durable, in place of an earlier one of the same name.

        Raises ValueError when blocks are missing, StorageFailed when the disk refuses; nothing is visible
        then.
        """
        if self.n_blocks_done != self.n_blocks:
            raise ValueError(f"{self.n_blocks_done} of {self.n_blocks} blocks are there")
        checksums = np.stack(self._checksums).astype("<u8").tobytes()
        manifest = self._manifest(checksums, canary)
        with storage_errors("publishing a snapshot"):
            for fd in self._fds:
                self._disk.sync_data(fd)
            write_manifest(self._area, self._directory, encode_manifest(manifest))
            self._disk.sync_dir(self._directory)
            self._before_publish(self._subject.name)
            move_into_place(self._area, self._subject.name, self._directory)
            self._published = True
            self._area.discard(self._directory)
            self._drop_journal()
        self.close()
        self._after_publish(self._subject.name)
        return manifest

    def _manifest(self, checksums: bytes, canary: Canary | None) -> Manifest:
        if self._sealer is None:
            return self._subject.manifest(self._geometry, checksums, self._clock(), canary)
        manifest = self._subject.manifest(self._geometry, checksums, self._clock(), None)
        sections: dict[str, object] = {"sealed": self._sealer.section(canary)}
        if self._sealer.runs:
            sections["sealed_runs"] = self._sealer.runs
        encoded = {name: msgspec.Raw(msgspec.json.encode(section)) for name, section in sections.items()}
        return msgspec.structs.replace(manifest, sections=manifest.sections | encoded)

    def abort(self) -> None:
        """Remove everything this build wrote."""
        try:
            with storage_errors("removing a build"):
                self._drop_journal()
                self._area.discard(self._directory)
        finally:
            self.close()

    def close(self) -> None:
        """Give back the lock and the files. A journal stays for the next `begin`."""
        self._close_files()
        self._lock.release()

    def __enter__(self) -> "SnapshotBuilder":
        return self

    def __exit__(self, *_: object) -> None:
        if self._published or self._is_document:
            self.close()
        else:
            self.abort()

    def _places(self, block: int) -> list[tuple[Shard, int]]:
        """The shard of each layer of a block, in order of the layers."""
        return [
            (shard, layer)
            for shard in self._geometry.shards_of(block)
            for layer in range(shard.first_layer, shard.first_layer + shard.n_layers)
        ]

    def _read_record(self, shard: Shard, block: int, layer: int) -> bytes:
        record = bytearray(self._subject.layout.record_nbytes(self._geometry.block_length(block)))
        offset = self._geometry.record_offset(shard, block, layer)
        with storage_errors("reading a block"):
            read_into(self._fds[shard.index], memoryview(record), offset)
        if self._geometry.checksum(memoryview(record), block, layer) != int(self._checksums[block][layer]):
            raise SnapshotMiss(MissReason.CHECKSUM, f"block {block} of layer {layer} of a build is damaged")
        if self._sealer is not None:
            self._sealer.opened(block, layer, memoryview(record))
        return bytes(record)

    def _check_records(self, block: int, records: Sequence[bytes | memoryview]) -> None:
        if block >= self.n_blocks:
            raise ValueError(f"all {self.n_blocks} blocks are there already")
        layout = self._subject.layout
        nbytes = layout.record_nbytes(self._geometry.block_length(block))
        sizes = [memoryview(record).nbytes for record in records]
        if sizes != [nbytes] * layout.n_layers:
            raise ValueError(f"block {block} takes {layout.n_layers} records of {nbytes} bytes")

    def _taken_up(self) -> bool:
        """Go on from the journal; False when there is none of this subject."""
        path, line = self._area.journal(self._subject.name), self._subject.line()
        n_layers, is_sealed = self._subject.layout.n_layers, self._keys is not None
        journal = Journal.load(path, line, n_layers, self._disk, is_sealed=is_sealed)
        if journal is None:
            return False
        self._journal = journal
        if not (self._unsealed(journal) and self._opened()):
            self._close_files()
            self._journal = self._sealer = None
            return False
        self._checksums = list(journal.checksums)
        for block in range(len(journal.checksums)):
            try:
                self.block_records(block)
            except (SnapshotMiss, StorageFailed):
                del self._checksums[block:]
                break
        journal.keep(len(self._checksums))
        if self._sealer is not None:
            journal.go_on(self._sealer.go_on(len(self._checksums)))
        return True

    def _unsealed(self, journal: Journal) -> bool:
        """Take what the journal says of seals; False when another key has sealed it."""
        if self._keys is None or journal.sealed is None:
            return True
        if journal.sealed.key_id != self._keys.id:
            return False
        self._sealer = self._new_sealer(self._keys, journal.sealed, journal.runs, journal.tags)
        return True

    def _new_sealer(self, keys: KeyRing, *begun: Any) -> Sealer:
        expected = self._subject.manifest(self._geometry, b"", 0.0, None)
        return Sealer(keys, expected, len(self._geometry.shards), *begun)

    def _opened(self) -> bool:
        """Open the shards of an earlier build; False unless each has its length, header and tokens."""
        for shard in self._geometry.shards:
            path = self._directory / shard.file_name
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                return False
            self._fds.append(fd)
            tokens = self._tokens_of(shard)
            found = bytearray(len(shard.header) + len(tokens))
            read_into(fd, memoryview(found), 0)
            if self._sealer is not None and not self._opens(self._sealer, shard, memoryview(found)):
                return False
            if os.fstat(fd).st_size != shard.nbytes or bytes(found) != shard.header + tokens:
                return False
        return True

    def _opens(self, sealer: Sealer, shard: Shard, preamble: memoryview) -> bool:
        try:
            sealer.opened_tokens(shard.index, preamble[len(shard.header) :])
        except SnapshotMiss:
            return False
        return True

    def _start(self) -> None:
        """Remove what an other build left, reserve the room, lay out the shards."""
        self._area.discard(self._directory)
        self._disk.remove(self._area.journal(self._subject.name))
        self._fds = reserve(
            self._area,
            self._directory,
            self._geometry.shards,
            needed_nbytes=self._geometry.nbytes + self._manifest_room,
            # Giving back what was reserved costs a small snapshot as much as a sync; its manifest is a few KB.
            manifest_nbytes=self._manifest_room if self._is_document else 0,
        )
        try:
            if self._keys is not None:
                self._sealer = self._new_sealer(self._keys)
            for shard, fd in zip(self._geometry.shards, self._fds, strict=True):
                self._disk.write_at(fd, self._preamble(shard), 0)
            if self._is_document:
                self._begin_journal()
        except BaseException:
            self._area.discard(self._directory)
            raise

    def _begin_journal(self) -> None:
        self._disk.sync_dir(self._directory)
        path = self._area.journal(self._subject.name)
        sealed = None if self._sealer is None else self._sealer.begun
        self._journal = Journal.create(path, self._subject.line(), self._disk, sealed)
        self._disk.sync_dir(self._area.building)

    def _preamble(self, shard: Shard) -> bytes:
        """What stands before the records in a shard."""
        tokens = self._tokens_of(shard)
        return shard.header + (tokens if self._sealer is None else self._sealer.tokens(shard.index, tokens))

    def _tokens_of(self, shard: Shard) -> bytes:
        last = shard.first_token + shard.n_tokens
        return self._subject.token_ids[shard.first_token : last].astype("<i4").tobytes()

    @property
    def _is_document(self) -> bool:
        return self._subject.name.key.kind == "document"

    @property
    def _manifest_room(self) -> int:
        """Bytes reserved for the manifest: in base64 11 for a checksum and 22 for a tag, the block table, more."""
        room = 8192 + self.n_blocks * (11 * self._subject.layout.n_layers + 40)
        if self._keys is None:
            return room
        return room + self.n_blocks * 22 * self._subject.layout.n_layers + 40 * len(self._geometry.shards)

    def _drop_journal(self) -> None:
        if self._journal is not None:
            self._disk.remove(self._journal.path)
            self._journal.close()
            self._journal = None

    def _close_files(self) -> None:
        if self._journal is not None:
            self._journal.close()
        while self._fds:
            os.close(self._fds.pop())
