"""From settings to a store with its tiers: the one place that knows which package each needs."""

import importlib
from pathlib import Path
from typing import Any

import msgspec

from cache_store.errors import KeyRefused
from cache_store.keyring import check_key, load_keys
from cache_store.store import SnapshotStore
from cache_store.tiers.breaker import GuardedTier
from cache_store.tiers.errors import TierSettings
from cache_store.tiers.tier import BlobTier


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tiers beyond the disk; an empty URL is none. Budgets of None are no limit of ours. `encryption_key_file`: of the
    key that snapshots of all tiers are sealed with; empty: that in PREREAD_ENCRYPTION_KEY, if there is one."""

    redis_url: str = ""
    redis_budget_nbytes: int | None = None
    redis_ttl_s: int = 24 * 3600
    object_url: str = ""
    object_budget_nbytes: int | None = None
    encryption_key_file: str = ""

    @property
    def any(self) -> bool:
        return bool(self.redis_url or self.object_url)


def open_store(root: Path, config: TierConfig, *, uploads: bool, **disk: Any) -> SnapshotStore:
    """The store below `root`: the plain disk tier without tiers beyond it, which costs then nothing at all.

    `uploads`: whether this process sends what it publishes. `disk` are arguments of `SnapshotStore`. Raises
    TierSettings for an URL or an installation that will not do, StorageFailed. No tier is asked yet: one that is down
    is no reason not to start. Raises KeyRefused for a key that is none, or not the one the store is used with.
    """
    keys = load_keys(config.encryption_key_file)
    if not config.any:
        store = SnapshotStore(root, keys=keys, **disk)
    else:
        from cache_store.tiers.store import TieredStore

        store = TieredStore(root, open_tiers(config), uploads=uploads, keys=keys, **disk)
    try:
        check_key(root, keys)
    except KeyRefused:
        store.close()
        raise
    return store


def open_tiers(config: TierConfig) -> list[BlobTier]:
    """The nearest first, each behind a breaker. Raises TierSettings."""
    tiers: list[BlobTier] = []
    if config.redis_url:
        tier = _class("redis", "RedisTier", "PREREAD_REDIS_URL")
        tiers.append(tier(config.redis_url, budget_nbytes=config.redis_budget_nbytes, ttl_s=config.redis_ttl_s))
    if config.object_url:
        tier = _class("object", "ObjectTier", "PREREAD_OBJECT_URL")
        tiers.append(tier(config.object_url, budget_nbytes=config.object_budget_nbytes))
    return [GuardedTier(tier) for tier in tiers]


def _class(extra: str, name: str, setting: str) -> Any:
    try:
        return getattr(importlib.import_module(f"cache_store.tiers.{extra}"), name)
    except ModuleNotFoundError as error:
        raise TierSettings(
            f"{setting} is set, and {error.name} is not installed: run .venv/bin/pip install '.[{extra}]' in Preread's "
            "folder."
        ) from None
