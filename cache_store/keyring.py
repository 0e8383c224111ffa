"""The operator's keys, from which all others are derived: where they come from, and which one a store is used with."""

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cache_store.disk import replace_text, storage_errors
from cache_store.errors import KeyRefused

KEY_NBYTES = 32
FILE_VARIABLE, KEY_VARIABLE = "PREREAD_ENCRYPTION_KEY_FILE", "PREREAD_ENCRYPTION_KEY"


class KeyRing:
    """Keys of 32 bytes each. With `key` everything is sealed; what `older` keys have sealed is opened too. `id` names
    the first and tells nothing about it."""

    def __init__(self, key: bytes, older: Sequence[bytes] = ()) -> None:
        for one in (key, *older):
            if len(one) != KEY_NBYTES:
                raise KeyRefused(f"a key has {KEY_NBYTES} bytes, not {len(one)}")
        self.id = _id(key)
        self._keys = {_id(one): one for one in (*older, key)}

    def has(self, key_id: str) -> bool:
        """Whether what that key sealed can be opened."""
        return key_id in self._keys

    def for_snapshot(self, owner_id: str, salt: bytes, key_id: str = "") -> AESGCM:
        """The cipher of one snapshot, by the first key or by the one of `key_id`, which must be here."""
        key = self._keys[key_id or self.id]
        of_owner = _derived(key, b"", b"preread owner " + owner_id.encode(), KEY_NBYTES)
        return AESGCM(_derived(of_owner, salt, b"preread snapshot", KEY_NBYTES))


def load_keys(file: str, environment: Mapping[str, str] = os.environ) -> KeyRing | None:
    """The keys in a file, or else in PREREAD_ENCRYPTION_KEY; None where neither is given. Each has 64 hex digits, or is
    in base64; the first is the one to seal with. Raises KeyRefused, without a word of what was read."""
    if file:
        try:
            text = Path(file).expanduser().read_text()
        except RuntimeError:
            raise KeyRefused(f"{FILE_VARIABLE}: {file} names a home directory that is not known") from None
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise KeyRefused(f"{FILE_VARIABLE}: {file} cannot be read: {why}") from None
        return _parsed(text, FILE_VARIABLE)
    text = environment.get(KEY_VARIABLE, "")
    return _parsed(text, KEY_VARIABLE) if text else None


def check_key(root: Path, keys: KeyRing | None) -> None:
    """Compare with the key that the store below `root` is used with, and note the one that is first now. Raises
    KeyRefused where the noted one is not among those given, StorageFailed."""
    note = root / "key"
    try:
        noted = note.read_text().strip()
    except FileNotFoundError:
        noted = ""
    except (OSError, UnicodeDecodeError) as error:
        raise KeyRefused(f"{note} cannot be read: {error}") from None
    if keys is not None and (not noted or keys.has(noted)):
        if keys.id != noted:
            with storage_errors(f"noting the key in {note}"):
                replace_text(note, keys.id + "\n")
        return
    if not noted:
        return
    found = "no key is given" if keys is None else f"the key given is another ({keys.id})"
    raise KeyRefused(
        f"the snapshots in {root} are encrypted with the key {noted}, and {found}. Give that key ({FILE_VARIABLE} or "
        f"{KEY_VARIABLE}), behind a new one to change it. Without it they cannot be read: remove {note} to have the "
        "documents read again"
    )


def _id(key: bytes) -> str:
    return _derived(key, b"", b"preread key id", 8).hex()


def _derived(key: bytes, salt: bytes, info: bytes, nbytes: int) -> bytes:
    return HKDF(SHA256(), nbytes, salt or None, info).derive(key)


def _parsed(text: str, variable: str) -> KeyRing:
    words = text.split()
    # A single key may be broken into lines.
    keys = [_key("".join(words))] if _key("".join(words)) else [_key(word) for word in words]
    if not keys or not all(keys):
        raise KeyRefused(
            f"{variable} is no key: it takes 64 hex digits (`openssl rand -hex 32`), or base64 of 32 bytes; further "
            "lines may have older keys"
        )
    return KeyRing(keys[0], keys[1:])


def _key(word: str) -> bytes:
    """Empty for what is no key."""
    try:
        key = bytes.fromhex(word) if len(word) == 2 * KEY_NBYTES else base64.b64decode(word, validate=True)
    except (ValueError, binascii.Error):
        return b""
    return key if len(key) == KEY_NBYTES else b""
