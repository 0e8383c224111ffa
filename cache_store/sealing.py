"""Encryption at rest: records, tokens and canary of a snapshot, sealed one by one with AES-256-GCM.

From the operator's key one key for each owner is derived, and from that one for each snapshot as it is written, with a
salt of its own (HKDF-SHA256): so a nonce is only the place of what is sealed. What is sealed keeps its length: offsets,
checksums and ranged reads are those of a snapshot in the clear, and tiers carry the bytes without a key. The tags are
in the manifest. Each is over the place too, and over all that the manifest says of the snapshot: what was moved, or is
of another snapshot, does not open.
"""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence

import msgspec
import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cache_store.errors import MissReason, SnapshotMiss
from cache_store.keyring import KeyRing
from cache_store.manifest import SEAL_SALT_NBYTES, SEAL_TAG_NBYTES, Canary, Manifest, Sealed, SealedRun
from cache_store.shards import Shard

_RECORD, _TOKENS, _CANARY = 0, 1, 2
_OPEN_SECTIONS = frozenset({"canary", "sealed", "sealed_runs"})
"""What of a manifest's sections is not part of the identity: the rest is known before anything is sealed."""


class _Ciphers:
    """Of each block its cipher: those of a build that was taken up have several, each from a block on."""

    def __init__(self, keys: KeyRing, owner_id: str, sealed: Sealed, runs: Sequence[SealedRun]) -> None:
        self._firsts = [run.first_block for run in runs]
        salts = [sealed.salt, *(run.salt for run in runs)]
        self._ciphers = [keys.for_snapshot(owner_id, salt, sealed.key_id) for salt in salts]

    def of(self, block: int) -> AESGCM:
        return self._ciphers[bisect_right(self._firsts, block)]

    @property
    def first(self) -> AESGCM:
        """Seals the tokens, which are written before any block."""
        return self._ciphers[0]

    @property
    def last(self) -> AESGCM:
        """Seals the canary, which comes behind all blocks."""
        return self._ciphers[-1]


class Sealer:
    """Seals the parts of one snapshot as it is written, and collects their tags. `manifest` is what it will have, but
    for checksums, time, and canary.

    `begun`, `runs`, `tags`: what the journal of an earlier build has. What is computed again may be other bytes, which
    must not be sealed with the same key and nonce: it has a salt of its own, see `go_on`."""

    def __init__(
        self,
        keys: KeyRing,
        manifest: Manifest,
        n_shards: int,
        begun: Sealed | None = None,
        runs: Sequence[SealedRun] = (),
        tags: Sequence[bytes] = (),
    ) -> None:
        self._keys, self._owner_id = keys, manifest.owner_id
        self._identity = _identity(manifest)
        self._n_layers = manifest.layout.n_layers
        self._begun = begun or Sealed(keys.id, os.urandom(SEAL_SALT_NBYTES), b"", b"", b"")
        self.runs = list(runs)
        self._tags = list(tags)
        self._ciphers = _Ciphers(keys, self._owner_id, self._begun, self.runs)

    @property
    def begun(self) -> Sealed:
        """For the journal, once all tokens are sealed."""
        return self._begun

    def go_on(self, first_block: int) -> SealedRun:
        """Seal with a new salt from a block on; tags of blocks from there on are forgotten."""
        del self._tags[first_block:]
        self.runs = [run for run in self.runs if run.first_block < first_block]
        self.runs.append(SealedRun(first_block, os.urandom(SEAL_SALT_NBYTES)))
        self._ciphers = _Ciphers(self._keys, self._owner_id, self._begun, self.runs)
        return self.runs[-1]

    def tokens(self, shard: int, data: bytes) -> bytes:
        """The sealed tokens of the next shard."""
        sealed, tag = self._seal(self._ciphers.first, _TOKENS, shard, data)
        begun = self._begun
        self._begun = msgspec.structs.replace(
            begun, token_tags=begun.token_tags + tag, token_checksums=begun.token_checksums + checksum_of(sealed)
        )
        return sealed

    def opened_tokens(self, shard: int, data: memoryview) -> None:
        """Open the tokens of a shard that were sealed here, in place. Raises SnapshotMiss."""
        tag = _nth(self._begun.token_tags, shard)
        _open(self._ciphers.first, _nonce(_TOKENS, shard), data, tag, self._identity)

    def records(self, block: int, records: Sequence[bytes | memoryview]) -> tuple[list[bytes], bytes]:
        """The sealed records of a block, and their tags, to be kept once those are written."""
        cipher, first = self._ciphers.of(block), block * self._n_layers
        parts = [self._seal(cipher, _RECORD, first + layer, record) for layer, record in enumerate(records)]
        return [sealed for sealed, _ in parts], b"".join(tag for _, tag in parts)

    def keep(self, tags: bytes) -> None:
        """The tags of the next block."""
        self._tags.append(tags)

    def opened(self, block: int, layer: int, data: memoryview) -> None:
        """Open a record that was sealed here, in place. Raises SnapshotMiss."""
        nonce, tag = _nonce(_RECORD, block * self._n_layers + layer), _nth(self._tags[block], layer)
        _open(self._ciphers.of(block), nonce, data, tag, self._identity)

    def section(self, canary: Canary | None) -> Sealed:
        """For the manifest, beside `runs`."""
        sealed = b""
        if canary is not None:
            sealed = b"".join(self._seal(self._ciphers.last, _CANARY, 0, msgspec.json.encode(canary)))
        return msgspec.structs.replace(self._begun, tags=b"".join(self._tags), canary=sealed)

    def _seal(self, cipher: AESGCM, kind: int, index: int, data: bytes | memoryview) -> tuple[bytes, bytes]:
        sealed = cipher.encrypt(_nonce(kind, index), data, self._identity)
        return sealed[:-SEAL_TAG_NBYTES], sealed[-SEAL_TAG_NBYTES:]


class Opener:
    """Opens the parts of one snapshot. Raises SnapshotMiss (`key`) for one that another key sealed."""

    def __init__(self, keys: KeyRing, manifest: Manifest, sealed: Sealed) -> None:
        if not keys.has(sealed.key_id):
            raise SnapshotMiss(MissReason.KEY, "the snapshot is encrypted with another key")
        self._sealed = sealed
        self._ciphers = _Ciphers(keys, manifest.owner_id, sealed, manifest.sealed_runs)
        self._identity = _identity(manifest)
        self._n_layers = manifest.layout.n_layers

    def tokens(self, shard: int, data: memoryview) -> None:
        """Open a shard's tokens in place. Raises SnapshotMiss (`checksum`), as the others do."""
        self._open(self._ciphers.first, _TOKENS, shard, data, self._sealed.token_tags)

    def record(self, block: int, layer: int, data: memoryview) -> None:
        """Open a record in place."""
        index = block * self._n_layers + layer
        self._open(self._ciphers.of(block), _RECORD, index, data, self._sealed.tags)

    def canary(self) -> Canary | None:
        if not self._sealed.canary:
            return None
        sealed = self._sealed.canary
        data = bytearray(sealed[:-SEAL_TAG_NBYTES])
        tag = sealed[-SEAL_TAG_NBYTES:]
        _open(self._ciphers.last, _nonce(_CANARY, 0), memoryview(data), tag, self._identity)
        return msgspec.json.decode(data, type=Canary)

    def _open(self, cipher: AESGCM, kind: int, index: int, data: memoryview, tags: bytes) -> None:
        _open(cipher, _nonce(kind, index), data, _nth(tags, index), self._identity)


def opener_of(manifest: Manifest, keys: KeyRing | None) -> Opener | None:
    """What opens a snapshot; None for one in the clear, where nothing is sealed. Raises SnapshotMiss (`key`) where one
    is and the other is not."""
    sealed = manifest.sealed
    if keys is None and sealed is not None:
        raise SnapshotMiss(MissReason.KEY, "the snapshot is encrypted, and no key is given")
    if keys is not None and sealed is None:
        raise SnapshotMiss(MissReason.KEY, "the snapshot is not encrypted, as it has to be now")
    return Opener(keys, manifest, sealed) if keys is not None and sealed is not None else None


def check_sealed_tokens(sealed: Sealed, shard: Shard, data: memoryview) -> None:
    """Compare the sealed tokens of a shard with their checksum. Raises SnapshotMiss."""
    if checksum_of(data) != sealed.token_checksums[shard.index * 8 : shard.index * 8 + 8]:
        raise SnapshotMiss(MissReason.CHECKSUM, f"the tokens of {shard.file_name} are damaged")


def _open(cipher: AESGCM, nonce: bytes, data: memoryview, tag: bytes, identity: bytes) -> None:
    try:
        data[:] = cipher.decrypt(nonce, b"".join((data, tag)), identity)
    except InvalidTag:
        raise SnapshotMiss(MissReason.CHECKSUM, "a part of the snapshot is not what was sealed there") from None


def checksum_of(data: bytes | memoryview) -> bytes:
    """xxh3-64, little-endian."""
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")


def _nonce(kind: int, index: int) -> bytes:
    return kind.to_bytes(4, "little") + index.to_bytes(8, "little")


def _identity(manifest: Manifest) -> bytes:
    """A digest of all that the manifest says of the snapshot."""
    sections = {name: bytes(raw) for name, raw in manifest.sections.items() if name not in _OPEN_SECTIONS}
    stripped = msgspec.structs.replace(manifest, checksums=b"", created_at=0.0, page_map=None, sections={})
    data = msgspec.json.encode(stripped) + msgspec.json.encode(sorted(sections.items()))
    return hashlib.blake2b(data, digest_size=32).digest()


def _nth(tags: bytes, index: int) -> bytes:
    return tags[index * SEAL_TAG_NBYTES : (index + 1) * SEAL_TAG_NBYTES]
