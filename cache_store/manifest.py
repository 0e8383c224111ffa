"""The manifest of a snapshot: what it is, what must agree before it is used, and a checksum of every record.

The file is ``{"xxh3":"<16 hex digits>","body":{...}}``; the checksum is over the body's bytes, and the
file must be exactly what the writer would write for that body. Numbers are checked before anything is
allocated for them.
"""

import os
from dataclasses import asdict
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Meta

from cache_store.disk import read_into
from cache_store.errors import MissReason, SnapshotMiss
from cache_store.fingerprint import Fingerprint
from cache_store.keys import EntryName, SnapshotKey
from cache_store.layout import LAYOUT_VERSION, KVLayout, KVType
from cache_store.segments import WHOLE, BlockTable, Count, Offset, Segments
from cache_store.shards import FORMAT_VERSION

MANIFEST_NAME = "manifest.json"
MANIFEST_LIMIT = 32 << 20
"""Bytes a manifest may have; that of a million tokens of an 80-layer model has 4 MB."""
SECTIONS = frozenset({"canary", "resident"})
"""Optional sections this version understands; any other makes the snapshot a miss (`version`)."""


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The top-k logits (fp32) at the last token, largest first, and the tokens they belong to."""

    token_ids: tuple[Annotated[int, Meta(ge=0, le=1 << 31)], ...]
    logits: tuple[float, ...]


class LayoutFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `KVLayout` with the version of the byte layout."""

    n_layers: Annotated[int, Meta(ge=1, le=4096)]
    n_kv_heads: Annotated[int, Meta(ge=1, le=4096)]
    head_dim: Annotated[int, Meta(ge=32, le=4096, multiple_of=32)]
    kv_type: KVType
    block_tokens: Annotated[int, Meta(ge=1, le=65536)]
    layout_version: int = LAYOUT_VERSION

    @classmethod
    def of(cls, layout: KVLayout) -> "LayoutFields":
        return cls(**asdict(layout))

    def layout(self) -> KVLayout:
        return KVLayout(self.n_layers, self.n_kv_heads, self.head_dim, self.kv_type, self.block_tokens)


class SegmentFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`Segments` of a document that has several."""

    segment_tokens: Count
    sink_tokens: Offset

    @classmethod
    def of(cls, segments: Segments) -> "SegmentFields | None":
        return cls(segments.segment_tokens, segments.sink_tokens) if segments != WHOLE else None


class ResidentRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows picked from a document stand where they stood there; this is where its last token does."""

    last_position: Offset


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of a manifest.

    `next_position` is where a question starts. `checksums`: little-endian xxh3-64 of each record, block-major
    ``[n_blocks, n_layers]``. `shard_nbytes`: length of each shard. `page_map`: pages as [first, last) token
    ranges. `retention`: how a document of several segments is cut. For a resident snapshot tokens are rows, and the
    positions of the block table count rows.
    """

    format_version: int = FORMAT_VERSION
    owner_id: str
    kind: str
    id: str
    payload: str = "blocks"
    fingerprint: dict[str, str]
    layout: LayoutFields
    n_tokens: Count
    token_digest: str
    context_digest: str
    next_position: Offset
    blocks: BlockTable
    shard_nbytes: list[Count]
    checksums: bytes
    created_at: float
    page_map: list[tuple[Offset, Offset]] | None = None
    retention: SegmentFields | None = None
    sections: dict[str, msgspec.Raw] = {}

    @property
    def key(self) -> SnapshotKey:
        return SnapshotKey(self.owner_id, self.kind, self.id)

    @property
    def n_blocks(self) -> int:
        return len(self.blocks.n_tokens)

    @property
    def first_position(self) -> int:
        """Position of the first token: 0 for a document, where a turn goes on from for a turn."""
        return self.blocks.first_position[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(self.shard_nbytes)

    @property
    def canary(self) -> Canary | None:
        raw = self.sections.get("canary")
        return None if raw is None else msgspec.json.decode(raw, type=Canary)

    @property
    def resident_rows(self) -> ResidentRows | None:
        raw = self.sections.get("resident")
        return None if raw is None else msgspec.json.decode(raw, type=ResidentRows)

    @property
    def segments(self) -> Segments:
        """How the tokens stand; that of a single segment is `WHOLE`. Raises ValueError for what cannot be."""
        stored = self.retention
        return WHOLE if stored is None else Segments(stored.segment_tokens, stored.sink_tokens)

    @property
    def last_position(self) -> int:
        """Where the last token stands."""
        rows = self.resident_rows
        return self.first_position + self.segments.last_position(self.n_tokens) if rows is None else rows.last_position

    def checksum_table(self) -> npt.NDArray[np.uint64]:
        """``[n_blocks, n_layers]``."""
        return np.frombuffer(self.checksums, "<u8").reshape(self.n_blocks, self.layout.n_layers)


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    xxh3: str
    body: msgspec.Raw


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of the manifest's file."""
    return _enveloped(msgspec.json.encode(manifest))


def _enveloped(body: bytes) -> bytes:
    return b'{"xxh3":"%s","body":%s}\n' % (xxhash.xxh3_64_hexdigest(body).encode(), body)


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
    if _enveloped(body) != data:
        raise SnapshotMiss(MissReason.CHECKSUM, "the manifest's checksum does not match its bytes")
    _check_version(body)
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
        _ = manifest.canary, manifest.resident_rows, manifest.segments
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


_FIELDS = frozenset(Manifest.__struct_fields__)
_RETENTION = frozenset(SegmentFields.__struct_fields__)


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
