"""What lies on disk under a snapshot's name, and whether its manifest can be believed.

A manifest is untrusted input: numbers are checked before anything is allocated for them, and what a later version may
have written is refused before it is interpreted.
"""

import errno
import os
from pathlib import Path

import msgspec

from cache_store.disk import NotPlain, is_transient, open_directory, open_plain, read_into
from cache_store.errors import MissReason, SnapshotMiss, StorageFailed
from cache_store.fingerprint import Fingerprint
from cache_store.keys import EntryName
from cache_store.layout import LAYOUT_VERSION, KVLayout
from cache_store.manifest import (
    MANIFEST_NAME,
    SEAL_SALT_NBYTES,
    SEAL_TAG_NBYTES,
    Manifest,
    SegmentFields,
    enveloped,
)
from cache_store.segments import WHOLE
from cache_store.shards import FORMAT_VERSION
from cache_store.slots import check_slots

MANIFEST_LIMIT = 32 << 20
"""Bytes a manifest may have; that of a million tokens of an 80-layer model has 4 MB."""
SECTIONS = frozenset({"canary", "resident", "slots", "sealed", "sealed_runs"})
"""Optional sections this version understands; any other makes the snapshot a miss (`version`)."""
_FIELDS = frozenset(Manifest.__struct_fields__)
_RETENTION = frozenset(SegmentFields.__struct_fields__)


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    xxh3: str
    body: msgspec.Raw


def read_stored_manifest(snapshots: Path, name: EntryName) -> Manifest:
    """The manifest of a published snapshot, whose other files are not looked at. Raises SnapshotMiss."""
    try:
        directory = located(snapshots, name)
        try:
            return manifest_in(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise as_miss(error) from None


def manifest_in(directory: int) -> Manifest:
    """The manifest in an open directory. Raises SnapshotMiss, OSError."""
    fd, nbytes = open_plain(MANIFEST_NAME, directory)
    try:
        return read_manifest(fd, nbytes)
    finally:
        os.close(fd)


def located(snapshots: Path, name: EntryName) -> int:
    """A descriptor of a published snapshot's directory. Raises SnapshotMiss (`absent`), OSError."""
    try:
        return open_directory(snapshots, *name.parts)
    except FileNotFoundError:
        raise SnapshotMiss(MissReason.ABSENT, "there is no snapshot") from None


def as_miss(error: OSError) -> SnapshotMiss:
    """What an error says about the snapshot. Raises StorageFailed when it says nothing about it."""
    if is_transient(error):
        raise StorageFailed(f"reading a snapshot: {error.strerror}") from error
    if isinstance(error, FileNotFoundError):
        return SnapshotMiss(MissReason.TRUNCATED, f"{error.filename} is missing")
    if isinstance(error, NotPlain) or error.errno in (errno.ELOOP, errno.ENOTDIR):
        return SnapshotMiss(MissReason.CHECKSUM, f"{error.filename} is not a plain file or directory")
    return SnapshotMiss(MissReason.CHECKSUM, f"cannot be read: {error.strerror or error}")


def read_manifest(fd: int, nbytes: int) -> Manifest:
    """The manifest in an open file of `nbytes` bytes. Raises SnapshotMiss; reads at most `MANIFEST_LIMIT`."""
    if not nbytes:
        raise SnapshotMiss(MissReason.TRUNCATED, "the manifest is empty")
    if nbytes > MANIFEST_LIMIT:
        raise SnapshotMiss(MissReason.CHECKSUM, f"a manifest of {nbytes} bytes is none this version writes")
    data = bytearray(nbytes)
    if read_into(fd, memoryview(data), 0) != nbytes or os.fstat(fd).st_size != nbytes:
        raise SnapshotMiss(MissReason.TRUNCATED, "the manifest changed its length while it was read")
    return decode_manifest(bytes(data))


def decode_manifest(data: bytes) -> Manifest:
    """The inverse of `encode_manifest`. Raises SnapshotMiss (`checksum`, `version`)."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotMiss(MissReason.CHECKSUM, f"the manifest is not readable: {error}") from None
    body = bytes(envelope.body)
    if enveloped(body) != data:
        raise SnapshotMiss(MissReason.CHECKSUM, "the manifest's checksum does not match its bytes")
    _check_version(body)
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
        _ = manifest.canary, manifest.resident_rows, manifest.slots, manifest.segments
        _ = manifest.sealed, manifest.sealed_runs
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise SnapshotMiss(MissReason.CHECKSUM, f"the manifest is not valid: {error}") from None
    _check_counts(manifest)
    return manifest


def _check_version(body: bytes) -> None:
    """Refuse what a later version may have written, before its fields are interpreted."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        version = msgspec.json.decode(fields.get("format_version", b"null"), type=int)
        sections = msgspec.json.decode(fields.get("sections", b"{}"), type=dict[str, msgspec.Raw])
        layout = msgspec.json.decode(fields.get("layout", b"{}"), type=dict[str, msgspec.Raw])
        retention = msgspec.json.decode(fields.get("retention", b"null"), type=dict[str, msgspec.Raw] | None) or {}
        payload = msgspec.json.decode(fields.get("payload", b"null"), type=str)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SnapshotMiss(MissReason.CHECKSUM, f"the manifest is not valid: {error}") from None
    if version != FORMAT_VERSION:
        _refuse(f"format version {version}, this version reads {FORMAT_VERSION}")
    if bytes(layout.get("layout_version", b"")) != b"%d" % LAYOUT_VERSION:
        _refuse(f"another layout of records than {LAYOUT_VERSION}")
    if payload != "blocks":
        _refuse(f"payload {payload!r}")
    unknown = sorted(set(sections) - SECTIONS) + sorted(set(fields) - _FIELDS) + sorted(set(retention) - _RETENTION)
    for name in unknown:
        _refuse(f"{name!r} is not known")


def _refuse(detail: str) -> None:
    raise SnapshotMiss(MissReason.VERSION, detail)


def _check_counts(manifest: Manifest) -> None:
    """Every count agrees with every other, by arithmetic alone."""
    layout = manifest.layout.layout()
    n_blocks = layout.n_blocks(manifest.n_tokens)
    table = manifest.blocks
    if {len(table.first_position), len(table.segment), len(table.n_tokens)} != {n_blocks}:
        raise SnapshotMiss(MissReason.CHECKSUM, "the block table does not cover the tokens")
    if len(manifest.checksums) != 8 * n_blocks * layout.n_layers:
        raise SnapshotMiss(MissReason.CHECKSUM, "there is not one checksum per record")
    if table.n_tokens != layout.block_lengths(manifest.n_tokens):
        raise SnapshotMiss(MissReason.CHECKSUM, "the blocks do not add up to the tokens")
    _check_positions(manifest, layout)
    _check_slots(manifest, layout)
    _check_sealed(manifest)


def _check_positions(manifest: Manifest, layout: KVLayout) -> None:
    """The block table is what the segments give, and so is the next position, but for picked rows."""
    segments, first, rows = manifest.segments, manifest.first_position, manifest.resident_rows
    if (rows is not None) != (manifest.kind == "resident"):
        raise SnapshotMiss(MissReason.CHECKSUM, "resident rows, and only they, have a last position of their own")
    if segments != segments.of_length(manifest.n_tokens):
        raise SnapshotMiss(MissReason.CHECKSUM, "a single segment is stored as several")
    if segments != WHOLE and manifest.kind != "document":
        _refuse(f"segments of a {manifest.kind} are not known")
    try:
        expected = segments.table(layout, manifest.n_tokens, first)
    except ValueError as error:
        raise SnapshotMiss(MissReason.CHECKSUM, f"the manifest is not valid: {error}") from None
    if manifest.blocks != expected:
        _refuse("blocks that do not stand where their segments say are not known")
    if rows is None and manifest.next_position != first + segments.next_position(manifest.n_tokens):
        _refuse("a next position that does not follow from the tokens is not known")
    if rows is not None and (first or rows.last_position >= manifest.next_position):
        raise SnapshotMiss(MissReason.CHECKSUM, "the positions of the resident rows cannot be")


def _check_slots(manifest: Manifest, layout: KVLayout) -> None:
    slots = manifest.slots
    if (slots is not None) != (manifest.kind == "slots"):
        raise SnapshotMiss(MissReason.CHECKSUM, "slots, and only they, are counted by head")
    try:
        if slots is not None:
            check_slots(slots.counts, layout, manifest.n_tokens)
    except ValueError as error:
        raise SnapshotMiss(MissReason.CHECKSUM, f"the manifest is not valid: {error}") from None


def _check_sealed(manifest: Manifest) -> None:
    sealed, runs = manifest.sealed, manifest.sealed_runs
    firsts = [run.first_block for run in runs]
    if firsts != sorted(set(firsts)) or any(len(run.salt) != SEAL_SALT_NBYTES for run in runs):
        raise SnapshotMiss(MissReason.CHECKSUM, "the runs of sealed blocks cannot be")
    if sealed is None:
        return
    n_shards = len(manifest.shard_nbytes)
    lengths = len(sealed.salt), len(sealed.tags), len(sealed.token_tags), len(sealed.token_checksums)
    tags = len(manifest.checksums) // 8 * SEAL_TAG_NBYTES
    if lengths != (SEAL_SALT_NBYTES, tags, n_shards * SEAL_TAG_NBYTES, n_shards * 8):
        raise SnapshotMiss(MissReason.CHECKSUM, "there is not one tag for each sealed part")


def check_identity(
    manifest: Manifest,
    name: EntryName,
    fingerprint: Fingerprint | None,
    layout: KVLayout | None,
    token_digest: str | None,
    context_digest: str | None,
) -> None:
    """Compare what is stored with what is asked for; None asks for nothing. Raises SnapshotMiss."""
    if (manifest.owner_id, manifest.kind, manifest.id) != (name.key.owner_id, name.key.kind, name.key.id):
        raise SnapshotMiss(MissReason.CHECKSUM, "the manifest is that of another snapshot")
    stored = _stored_fingerprint(manifest)
    if fingerprint is not None and stored != fingerprint:
        names = ", ".join(stored.differences(fingerprint))
        raise SnapshotMiss(MissReason.FINGERPRINT, f"made with another {names}")
    if stored.digest != name.fingerprint_digest:
        raise SnapshotMiss(MissReason.FINGERPRINT, "the snapshot lies under another fingerprint")
    if layout is not None and manifest.layout.layout() != layout:
        raise SnapshotMiss(MissReason.FINGERPRINT, "made with another KV layout")
    if token_digest is not None and manifest.token_digest != token_digest:
        raise SnapshotMiss(MissReason.CHECKSUM, "the snapshot is of other tokens than those asked for")
    if context_digest is not None and manifest.context_digest != context_digest:
        raise SnapshotMiss(MissReason.CHECKSUM, "the snapshot follows other tokens than those asked for")


def _stored_fingerprint(manifest: Manifest) -> Fingerprint:
    try:
        return Fingerprint(**manifest.fingerprint)
    except TypeError:
        raise SnapshotMiss(MissReason.VERSION, "the fingerprint has other fields") from None
