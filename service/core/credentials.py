"""Keys and links: `id.secret`, of which only the id and a hash of the secret are stored.

A secret has 256 random bits, so nobody finds it from its hash however fast that is: a slow hash, made for passwords,
would only make every request slow. The hash is keyed with the id: that of one key says nothing about another one.
"""

import hashlib
import hmac
import re
import secrets

KEY, LINK = "key", "shr"
"""What ids of keys, and of shares, begin with (`new_id`)."""
SECRET_CHARS = 43
_TOKEN = re.compile(rf"((?:{KEY}|{LINK})_[0-9a-z]{{8,60}})\.([A-Za-z0-9_-]{{43,128}})")
_NOBODY = "0" * 64


def is_key(id: str) -> bool:
    """Whether an id, or a token, is a key's."""
    return id.startswith(f"{KEY}_")


def is_link(id: str) -> bool:
    """Whether an id, or a token, is a link's."""
    return id.startswith(f"{LINK}_")


def new_secret() -> str:
    """256 random bits, as text."""
    return secrets.token_urlsafe(32)


def digest_of(id: str, secret: str) -> str:
    """What is stored of a secret: 64 hex digits."""
    return hashlib.blake2b(secret.encode(), key=id.encode()[:64], person=b"preread-key", digest_size=32).hexdigest()


def split(token: str) -> tuple[str, str] | None:
    """Id and secret, or None for what is no key and no link."""
    match = _TOKEN.fullmatch(token)
    return (match[1], match[2]) if match else None


def matches(digest: str | None, id: str, secret: str) -> bool:
    """Whether a secret is that of a stored digest. Takes the same time for a wrong one, and where there is none."""
    return hmac.compare_digest(digest or _NOBODY, digest_of(id, secret)) and digest is not None
