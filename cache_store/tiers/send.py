"""Sends a published snapshot to a tier, reading it the way every reader does: nothing unchecked leaves the disk."""

import os
from collections.abc import Iterator

import numpy as np

from cache_store.area import Area
from cache_store.disk import open_plain, read_into
from cache_store.errors import MissReason, SnapshotMiss
from cache_store.keys import EntryName
from cache_store.lock import share
from cache_store.manifest import MANIFEST_NAME
from cache_store.stored import MANIFEST_LIMIT, as_miss, located
from cache_store.tiers.copy import CopyPlan
from cache_store.tiers.tier import BlobTier


def send(area: Area, name: EntryName, tier: BlobTier) -> int:
    """Store a copy of what is published under a name, unless the tier has an equal one; the bytes sent.

    Raises SnapshotMiss (nothing is published, or it is damaged), TierDown, TierRefused, StorageFailed.
    """
    try:
        directory = located(area.snapshots, name)
    except OSError as error:
        raise as_miss(error) from None
    try:
        share(directory)
        return _send(directory, name, tier)
    except OSError as error:
        raise as_miss(error) from None
    finally:
        os.close(directory)


def local_manifest(area: Area, name: EntryName) -> bytes | None:
    """The bytes of a published snapshot's manifest; None when there is none to be read."""
    try:
        directory = located(area.snapshots, name)
    except (OSError, SnapshotMiss):
        return None
    try:
        return _manifest_bytes(directory)
    except (OSError, SnapshotMiss):
        return None
    finally:
        os.close(directory)


def _send(directory: int, name: EntryName, tier: BlobTier) -> int:
    plan = CopyPlan(name, _manifest_bytes(directory))
    there = tier.manifest(name)
    if there is not None and plan.same_as(there):
        return 0
    tier.write(name, plan.data, plan.nbytes, _shards(directory, plan))
    return plan.nbytes + len(plan.data)


def _manifest_bytes(directory: int) -> bytes:
    fd, nbytes = open_plain(MANIFEST_NAME, directory)
    try:
        data = bytearray(min(nbytes, MANIFEST_LIMIT))
        if read_into(fd, memoryview(data), 0) != nbytes:
            raise SnapshotMiss(MissReason.TRUNCATED, "the manifest changed its length while it was read")
        return bytes(data)
    finally:
        os.close(fd)


def _shards(directory: int, plan: CopyPlan) -> Iterator[memoryview]:
    """Each shard in turn, checked, in the same memory."""
    buffer = np.empty(plan.largest_nbytes, np.uint8).data
    for shard in plan.shards:
        fd, nbytes = open_plain(shard.file_name, directory)
        try:
            memory = buffer[: shard.nbytes]
            if nbytes != shard.nbytes or read_into(fd, memory, 0) != nbytes:
                raise SnapshotMiss(MissReason.TRUNCATED, f"{shard.file_name} has {nbytes} of {shard.nbytes} bytes")
        finally:
            os.close(fd)
        plan.check(shard, memory)
        yield memory
