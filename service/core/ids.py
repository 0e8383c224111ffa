"""Ids: a prefix that names the kind, and 26 random characters that sort by time of making."""

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def _base32(value: int, length: int) -> str:
    return "".join(_ALPHABET[(value >> (5 * i)) & 31] for i in range(length - 1, -1, -1))


def new_id(prefix: str) -> str:
    """`doc_…`, `ses_…`, `ans_…`: 48 bits of milliseconds, then 80 random bits."""
    return f"{prefix}_{_base32(time.time_ns() // 1_000_000, 10)}{_base32(secrets.randbits(80), 16)}"
