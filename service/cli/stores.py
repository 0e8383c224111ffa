"""The snapshot store as commands open it, and names in it for people."""

from typing import Any


def open_snapshots() -> Any:
    """The store that the settings name, beside a server that may use it."""
    from cache_store.tiers.opening import open_store
    from service.cli.config import read_settings
    from service.core.snapshot_tier import tier_config

    settings = read_settings()
    return open_store(settings.store_dir, tier_config(settings), uploads=False)


def named(name: Any) -> dict[str, Any]:
    """The columns of a snapshot's name."""
    key = name.key
    return {"owner_id": key.owner_id, "kind": key.kind, "id": key.id, "fingerprint": name.fingerprint_digest}
