"""Encryption at rest: records, tokens and canary of a snapshot, sealed one by one with AES-256-GCM.

From the operator's key one key for each owner is derived, and from that one for each snapshot as it is written, with a
salt of its own (HKDF-SHA256): so a nonce is only the place of what is sealed. What is sealed keeps its length: offsets,
checksums and ranged reads are those of a snapshot in the clear, and tiers carry the bytes without a key. The tags are
in the manifest. Each is over the place too, and over all that the manifest says of the snapshot: what was moved, or is
of another snapshot, does not open.
"""

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cache_store.errors import KeyRefused, MissReason, SnapshotMiss
from cache_store.manifest import SEAL_SALT_NBYTES, SEAL_TAG_NBYTES, Canary, Manifest, Sealed
from cache_store.shards import Shard

KEY_NBYTES = 32
FILE_VARIABLE, KEY_VARIABLE = "PREREAD_ENCRYPTION_KEY_FILE", "PREREAD_ENCRYPTION_KEY"
_RECORD, _TOKENS, _CANARY = 0, 1, 2
_OPEN_SECTIONS = frozenset({"canary", "sealed"})
"""What of a manifest's sections is not part of the identity: the rest is known before anything is sealed."""


class KeyRing:
    """The operator's key of 32 bytes, and all that is derived from it. `id` names it and tells nothing about it."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_NBYTES:
            raise KeyRefused(f"a key has {KEY_NBYTES} bytes, not {len(key)}")
        self._key = key
        self.id = _derived(key, b"", b"preread key id", 8).hex()

    def for_snapshot(self, owner_id: str, salt: bytes) -> AESGCM:
        """The cipher of one snapshot."""
        of_owner = _derived(self._key, b"", b"preread owner " + owner_id.encode(), KEY_NBYTES)
        return AESGCM(_derived(of_owner, salt, b"preread snapshot", KEY_NBYTES))


class Sealer:
    """Seals the parts of one snapshot as it is written, and collects their tags. `manifest` is what it will have, but
    for checksums, time, and canary."""

    def __init__(self, keys: KeyRing, manifest: Manifest, n_shards: int) -> None:
        self._salt = os.urandom(SEAL_SALT_NBYTES)
        self._key_id = keys.id
        self._cipher = keys.for_snapshot(manifest.owner_id, self._salt)
        self._identity = _identity(manifest)
        self._n_layers = manifest.layout.n_layers
        self._tags: list[bytes] = []
        self._token_tags, self._token_checksums = [b""] * n_shards, [b""] * n_shards

    def tokens(self, shard: int, data: bytes) -> bytes:
        """The sealed tokens of a shard."""
        sealed, self._token_tags[shard] = self._seal(_TOKENS, shard, data)
        self._token_checksums[shard] = checksum_of(sealed)
        return sealed

    def records(self, block: int, records: Sequence[bytes | memoryview]) -> list[bytes]:
        """The sealed records of the next block."""
        first = block * self._n_layers
        parts = [self._seal(_RECORD, first + layer, record) for layer, record in enumerate(records)]
        self._tags += [tag for _, tag in parts]
        return [sealed for sealed, _ in parts]

    def opened(self, block: int, layer: int, data: memoryview) -> None:
        """Open a record that was sealed here, in place. Raises SnapshotMiss."""
        index = block * self._n_layers + layer
        _open(self._cipher, _nonce(_RECORD, index), data, self._tags[index], self._identity)

    def section(self, canary: Canary | None) -> Sealed:
        """For the manifest."""
        sealed = b""
        if canary is not None:
            sealed = b"".join(self._seal(_CANARY, 0, msgspec.json.encode(canary)))
        return Sealed(
            self._key_id,
            self._salt,
            b"".join(self._tags),
            b"".join(self._token_tags),
            b"".join(self._token_checksums),
            sealed,
        )

    def _seal(self, kind: int, index: int, data: bytes | memoryview) -> tuple[bytes, bytes]:
        sealed = self._cipher.encrypt(_nonce(kind, index), data, self._identity)
        return sealed[:-SEAL_TAG_NBYTES], sealed[-SEAL_TAG_NBYTES:]


class Opener:
    """Opens the parts of one snapshot. Raises SnapshotMiss (`key`) for one that another key sealed."""

    def __init__(self, keys: KeyRing, manifest: Manifest, sealed: Sealed) -> None:
        if sealed.key_id != keys.id:
            raise SnapshotMiss(MissReason.KEY, "the snapshot is encrypted with another key")
        self._sealed = sealed
        self._cipher = keys.for_snapshot(manifest.owner_id, sealed.salt)
        self._identity = _identity(manifest)
        self._n_layers = manifest.layout.n_layers

    def tokens(self, shard: int, data: memoryview) -> None:
        """Open a shard's tokens in place. Raises SnapshotMiss (`checksum`), as the others do."""
        self._open(_TOKENS, shard, data, self._sealed.token_tags)

    def record(self, block: int, layer: int, data: memoryview) -> None:
        """Open a record in place."""
        self._open(_RECORD, block * self._n_layers + layer, data, self._sealed.tags)

    def canary(self) -> Canary | None:
        if not self._sealed.canary:
            return None
        sealed = self._sealed.canary
        data = bytearray(sealed[:-SEAL_TAG_NBYTES])
        _open(self._cipher, _nonce(_CANARY, 0), memoryview(data), sealed[-SEAL_TAG_NBYTES:], self._identity)
        return msgspec.json.decode(data, type=Canary)

    def _open(self, kind: int, index: int, data: memoryview, tags: bytes) -> None:
        at = index * SEAL_TAG_NBYTES
        _open(self._cipher, _nonce(kind, index), data, tags[at : at + SEAL_TAG_NBYTES], self._identity)


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


def load_keys(file: str, environment: Mapping[str, str] = os.environ) -> KeyRing | None:
    """The key in a file, or else in PREREAD_ENCRYPTION_KEY; None where neither is given. 64 hex digits, or base64 of 32
    bytes. Raises KeyRefused, without a word of what was read."""
    if file:
        try:
            text = Path(file).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise KeyRefused(f"{FILE_VARIABLE}: {file} cannot be read: {why}") from None
        return KeyRing(_parsed(text, FILE_VARIABLE))
    text = environment.get(KEY_VARIABLE, "")
    return KeyRing(_parsed(text, KEY_VARIABLE)) if text else None


def check_key(root: Path, keys: KeyRing | None) -> None:
    """Compare with the key that the store below `root` is used with, and note the first. Raises KeyRefused."""
    note = root / "key"
    try:
        noted = note.read_text().strip()
    except FileNotFoundError:
        if keys is not None:
            note.write_text(keys.id + "\n")
        return
    except (OSError, UnicodeDecodeError) as error:
        raise KeyRefused(f"{note} cannot be read: {error}") from None
    if keys is not None and keys.id == noted:
        return
    found = "no key is given" if keys is None else f"the key given is another ({keys.id})"
    raise KeyRefused(
        f"the snapshots in {root} are encrypted with the key {noted}, and {found}. Give that key ({FILE_VARIABLE} or "
        f"{KEY_VARIABLE}). Without it they cannot be read: remove {note} to have the documents read again"
    )


def _open(cipher: AESGCM, nonce: bytes, data: memoryview, tag: bytes, identity: bytes) -> None:
    try:
        data[:] = cipher.decrypt(nonce, b"".join((data, tag)), identity)
    except InvalidTag:
        raise SnapshotMiss(MissReason.CHECKSUM, "a part of the snapshot is not what was sealed there") from None


def checksum_of(data: bytes | memoryview) -> bytes:
    """xxh3-64, little-endian."""
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")


def _derived(key: bytes, salt: bytes, info: bytes, nbytes: int) -> bytes:
    return HKDF(SHA256(), nbytes, salt or None, info).derive(key)


def _nonce(kind: int, index: int) -> bytes:
    return kind.to_bytes(4, "little") + index.to_bytes(8, "little")


def _identity(manifest: Manifest) -> bytes:
    """A digest of all that the manifest says of the snapshot."""
    sections = {name: bytes(raw) for name, raw in manifest.sections.items() if name not in _OPEN_SECTIONS}
    stripped = msgspec.structs.replace(manifest, checksums=b"", created_at=0.0, page_map=None, sections={})
    data = msgspec.json.encode(stripped) + msgspec.json.encode(sorted(sections.items()))
    return hashlib.blake2b(data, digest_size=32).digest()


def _parsed(text: str, variable: str) -> bytes:
    text = "".join(text.split())
    try:
        key = bytes.fromhex(text) if len(text) == 2 * KEY_NBYTES else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != KEY_NBYTES:
        raise KeyRefused(
            f"{variable} is no key: it takes 64 hex digits (`openssl rand -hex 32`), or base64 of 32 bytes"
        )
    return key
