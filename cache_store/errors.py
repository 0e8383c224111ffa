"""Errors of the snapshot store.

CacheStoreError
├── SnapshotMiss        a snapshot cannot be used, with a MissReason: never an answer, always a re-prefill
├── BudgetExceeded      the disk budget or the free-space floor would be broken; nothing was written
├── BuildLocked         another writer builds this very snapshot
├── KeyRefused          an encryption key that is none, or not the one that is needed; told at start
└── StorageFailed       the operating system refused a write (disk full, permissions)
"""

from enum import StrEnum


class MissReason(StrEnum):
    """Why a snapshot was not used (the words of the REST contract)."""

    FINGERPRINT = "fingerprint"
    CHECKSUM = "checksum"
    TRUNCATED = "truncated"
    VERSION = "version"
    ABSENT = "absent"
    EVICTED = "evicted"
    CANARY = "canary"
    KEY = "key"


class CacheStoreError(Exception):
    """Base of all errors this package raises on purpose."""


class SnapshotMiss(CacheStoreError):
    """The snapshot cannot be used; `reason` says why in one word, `detail` in a sentence."""

    def __init__(self, reason: MissReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        """Whoever handles a miss may add to its detail."""
        return f"{self.reason}: {self.detail}"


class SnapshotMoved(SnapshotMiss):
    """The directory was taken away, or replaced, while it was opened: what is there now is to be opened instead."""


class BudgetExceeded(CacheStoreError):
    """Writing would exceed the disk budget or the free-space floor."""

    def __init__(self, needed_nbytes: int, available_nbytes: int, detail: str) -> None:
        super().__init__(detail)
        self.needed_nbytes = needed_nbytes
        self.available_nbytes = available_nbytes


class BuildLocked(CacheStoreError):
    """Another process is building the same snapshot."""


class KeyRefused(CacheStoreError):
    """An encryption key cannot be used; the message has no part of it."""


class StorageFailed(CacheStoreError):
    """A write failed in the operating system; whatever was half-written is not visible."""
