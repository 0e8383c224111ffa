"""Reads a snapshot. Nothing is handed out before its checksum passed in this process's own memory."""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cache_store.disk import open_plain, read_into
from cache_store.errors import MissReason, SnapshotMiss, SnapshotMoved
from cache_store.fingerprint import Fingerprint, token_digest
from cache_store.keyring import KeyRing
from cache_store.keys import EntryName
from cache_store.layout import KVLayout
from cache_store.lock import share
from cache_store.manifest import Canary, Manifest, Sealed
from cache_store.pieces import Buffers, Order, Piece, Run, Span, block_spans, layer_spans, plan_spans
from cache_store.readahead import HeapBuffers, read_ahead, read_inline, read_together
from cache_store.sealing import Opener, check_sealed_tokens, opener_of
from cache_store.segments import Segments
from cache_store.shards import TOKEN_NBYTES, Geometry, Shard, plan_shards
from cache_store.stored import as_miss, check_identity, located, manifest_in

_INLINE_NBYTES = 2 << 20


class SnapshotReader:
    """An open snapshot: its files stay readable when it is deleted, replaced or moved meanwhile.

    A context manager. `token_ids` are verified; `pieces`, `layers` and `read_layer` verify each record they
    read and raise SnapshotMiss at the first that fails. `directory_id` tells this directory from a later one
    of the same name, `source` the tier that it came from.
    """

    manifest: Manifest
    layout: KVLayout
    token_ids: npt.NDArray[np.int32]
    canary: Canary | None = None

    def __init__(
        self,
        snapshots: Path,
        name: EntryName,
        *,
        fingerprint: Fingerprint | None = None,
        layout: KVLayout | None = None,
        token_digest: str | None = None,
        context_digest: str | None = None,
        on_damage: Callable[["SnapshotReader", SnapshotMiss], None] | None = None,
        keys: KeyRing | None = None,
        check_only: bool = False,
    ) -> None:
        """Open and check everything but the records. Raises SnapshotMiss, or StorageFailed when this process
        is out of descriptors or memory (which says nothing about the snapshot). Nobody evicts what is open.
        With `keys` only what they sealed is opened, without only what is not sealed. `check_only`: anything, to be
        compared with its checksums; what is sealed stays so."""
        self.name = name
        self.directory_id = (0, 0)
        self.source = "disk"
        self._on_damage = on_damage
        self._keys, self._check_only = keys, check_only
        self._opener: Opener | None = None
        self._fds: list[int] = []
        self._buffers = HeapBuffers()
        self._running: list[Generator[Piece]] = []
        try:
            directory = self._own(located(snapshots, name))
            share(directory)
            status = os.fstat(directory)
            self.directory_id = (status.st_dev, status.st_ino)
            self._read_manifest(directory)
            check_identity(self.manifest, name, fingerprint, layout, token_digest, context_digest)
            if not check_only:
                self._opener = opener_of(self.manifest, keys)
                self.canary = self.manifest.canary if self._opener is None else self._opener.canary()
            self._open_shards(directory)
        except (OSError, SnapshotMiss) as error:
            try:
                if self._has_moved(snapshots):
                    raise SnapshotMoved(MissReason.ABSENT, "the snapshot was removed while it was opened") from None
                raise self._damage(error) from None
            finally:
                self.close()

    @property
    def n_tokens(self) -> int:
        return self.manifest.n_tokens

    @property
    def segments(self) -> Segments:
        """How the tokens stand; `WHOLE` when they are a single segment, whatever it was built with."""
        return self.manifest.segments

    @property
    def next_position(self) -> int:
        """Where the first token behind this stands."""
        return self.manifest.next_position

    @property
    def last_position(self) -> int:
        """Where the last token stands."""
        return self.manifest.last_position

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return self.manifest.nbytes

    def pieces(self, buffers: Buffers | None = None, order: Order = "shard") -> Iterator[Piece]:
        """Every record, read ahead while the caller works, into `buffers` or else ordinary memory.

        Whoever takes a piece gives it back with `release`. A piece that fails, and those nobody took, are given back
        here, at the latest when the reader is closed.
        """
        buffers = buffers or self._buffers
        spans = plan_spans(self._geometry, buffers.piece_nbytes, order)
        read = read_ahead if self.nbytes > _INLINE_NBYTES else read_inline
        pieces = read(spans, self._read, buffers)
        self._running.append(pieces)
        return self._watched(pieces)

    def layers(self) -> Iterator[Run]:
        """The runs of all pieces, shard by shard, layer by layer within a shard.

        The memory of a run is the caller's for as long as it keeps a reference.
        """
        for piece in self.pieces():
            yield from piece.runs

    def read_layer(self, layer: int) -> list[Run]:
        """All records of one layer, in order of their tokens."""
        spans = layer_spans(self._geometry, layer)
        return [run for piece in self._watched(read_inline(spans, self._read, self._buffers)) for run in piece.runs]

    def read_blocks(self, blocks: Sequence[int]) -> list[list[memoryview]]:
        """The records of some blocks, for ``blocks[i]`` of all layers as ``[i][layer]``; nothing else is read.

        They lie in one piece of memory, which is there as long as one of them is referred to. Several threads may ask
        at once. Raises SnapshotMiss, and ValueError for a block that is none.
        """
        if blocks and not 0 <= min(blocks) <= max(blocks) < self._geometry.n_blocks:
            raise ValueError(f"blocks {min(blocks)} to {max(blocks)} are not all among {self._geometry.n_blocks}")
        try:
            runs = read_together(block_spans(self._geometry, blocks), self._read)
        except (OSError, SnapshotMiss) as error:
            raise self._damage(error) from None
        found: dict[int, list[memoryview]] = {block: [] for block in blocks}
        for _, first_token, records, n_tokens in sorted(runs, key=lambda run: run[0]):
            at = 0
            for block, length in enumerate(
                self.layout.block_lengths(n_tokens), first_token // self.layout.block_tokens
            ):
                nbytes = self.layout.record_nbytes(length)
                found[block].append(records[at : at + nbytes])
                at += nbytes
        return [found[block] for block in blocks]

    def verify_all(self) -> None:
        """Read and check every record. Raises SnapshotMiss."""
        for _ in self.layers():
            pass

    def close(self) -> None:
        """Close all files; iterators of `pieces` and `layers` end."""
        for pieces in self._running:
            pieces.close()
        self._running.clear()
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> "SnapshotReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _has_moved(self, snapshots: Path) -> bool:
        """Whether the directory opened is no longer the one of this name."""
        if self.directory_id == (0, 0):
            return False
        try:
            status = os.lstat(snapshots.joinpath(*self.name.parts))
        except OSError:
            return True
        return (status.st_dev, status.st_ino) != self.directory_id

    def _read_manifest(self, directory: int) -> None:
        self.manifest = manifest_in(directory)
        self.layout = self.manifest.layout.layout()

    def _open_shards(self, directory: int) -> None:
        self._geometry: Geometry = plan_shards(self.name, self.layout, self.n_tokens)
        self._checksums = self.manifest.checksum_table()
        if [shard.nbytes for shard in self._geometry.shards] != self.manifest.shard_nbytes:
            raise SnapshotMiss(MissReason.CHECKSUM, "the manifest's shards are not those of its tokens")
        self._shard_fds: list[int] = []
        tokens, sealed = np.empty(self.n_tokens, "<i4"), self.manifest.sealed
        for shard in self._geometry.shards:
            fd, nbytes = open_plain(shard.file_name, directory)
            self._shard_fds.append(self._own(fd))
            _check_header(fd, shard, nbytes)
            part = tokens[shard.first_token : shard.first_token + shard.n_tokens]
            _read_tokens(fd, shard, part, sealed, self._opener)
        is_known = sealed is None or self._opener is not None
        if is_known and token_digest(tokens.tobytes()) != self.manifest.token_digest:
            raise SnapshotMiss(MissReason.CHECKSUM, "the stored tokens do not match their digest")
        self.token_ids = tokens

    def _watched(self, pieces: Generator[Piece]) -> Iterator[Piece]:
        try:
            yield from pieces
        except (OSError, SnapshotMiss) as error:
            raise self._damage(error) from None

    def _read(self, span: Span, memory: memoryview) -> list[Run]:
        """Read a span into memory of its size and verify it; its runs, one for each layer."""
        shard = span.shard
        if read_into(self._shard_fds[shard.index], memory, span.offset) != span.nbytes:
            raise SnapshotMiss(MissReason.TRUNCATED, f"{shard.file_name} ends within layer {span.first_layer}")
        lengths = [self._geometry.block_length(block) for block in span.blocks]
        sizes = [self.layout.record_nbytes(length) for length in lengths]
        first, n_tokens, nbytes = span.first_block * self.layout.block_tokens, sum(lengths), sum(sizes)
        runs: list[Run] = []
        for i, layer in enumerate(span.layers):
            records = memory[i * nbytes : (i + 1) * nbytes]
            self._verify(records, layer, span, sizes)
            runs.append((layer, first, records, n_tokens))
        return runs

    def _verify(self, records: memoryview, layer: int, span: Span, sizes: list[int]) -> None:
        at = 0
        for block, nbytes in zip(span.blocks, sizes, strict=True):
            found = self._geometry.checksum(records[at : at + nbytes], block, layer)
            if found != int(self._checksums[block, layer]):
                raise SnapshotMiss(MissReason.CHECKSUM, f"block {block} of layer {layer} is damaged")
            if self._opener is not None:
                self._opener.record(block, layer, records[at : at + nbytes])
            at += nbytes

    def _damage(self, error: OSError | SnapshotMiss) -> SnapshotMiss:
        """The miss that an error met while reading amounts to, reported to whoever opened this reader."""
        miss = error if isinstance(error, SnapshotMiss) else as_miss(error)
        if self._on_damage is not None:
            self._on_damage(self, miss)
        return miss


def _check_header(fd: int, shard: Shard, nbytes: int) -> None:
    header = bytearray(len(shard.header))
    n = read_into(fd, memoryview(header), 0)
    if bytes(header[:n]) != shard.header[:n]:
        raise SnapshotMiss(MissReason.CHECKSUM, f"{shard.file_name} is not the shard it should be")
    if nbytes != shard.nbytes:
        raise SnapshotMiss(MissReason.TRUNCATED, f"{shard.file_name} has {nbytes} of {shard.nbytes} bytes")


def _read_tokens(
    fd: int, shard: Shard, part: npt.NDArray[np.int32], sealed: Sealed | None, opener: Opener | None
) -> None:
    """Fill `part` with a shard's tokens; where layers are split over shards, all must hold the same."""
    stored = np.empty_like(part)
    if read_into(fd, stored.data.cast("B"), shard.tokens_offset) != shard.n_tokens * TOKEN_NBYTES:
        raise SnapshotMiss(MissReason.TRUNCATED, f"{shard.file_name} ends within its tokens")
    if sealed is not None:
        memory = stored.data.cast("B")
        check_sealed_tokens(sealed, shard, memory)
        if opener is None:
            return  # what they are is not known without the key
        opener.tokens(shard.index, memory)
    if shard.first_layer and not np.array_equal(stored, part):
        raise SnapshotMiss(MissReason.CHECKSUM, f"{shard.file_name} holds other tokens than its neighbours")
    part[:] = stored
