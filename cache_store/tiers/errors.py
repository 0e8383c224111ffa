"""Errors of the tiers beyond the disk; none of them is ever an answer's end.

CacheStoreError
├── TierDown      the tier does not answer, or answers with an error of its own: try again later
├── TierRefused   the tier has no room for this snapshot
└── TierSettings  a URL or an extra is wrong; told at start, in a sentence
"""

from cache_store.errors import CacheStoreError


class TierDown(CacheStoreError):
    """The tier cannot be used now; nothing is known about what it holds."""


class TierRefused(CacheStoreError):
    """The tier does not take a snapshot: its budget or its memory is full."""


class TierSettings(CacheStoreError):
    """The tier cannot be opened as it is configured."""
