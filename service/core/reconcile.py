"""The snapshot store and its tiers against the rows of the database: what belongs to nobody goes."""

import asyncio

from cache_store.keys import SnapshotKey
from cache_store.tiers.opening import open_store
from cache_store.tiers.reconcile import Reconciled, reconcile
from service.core.own_database import check_database
from service.core.snapshot_tier import tier_config
from service.db.engine import Database
from service.settings import Settings


async def reconcile_snapshots(settings: Settings, *, dry_run: bool) -> Reconciled:
    """Safe while a server runs. Raises ServiceError for a database that is not there or not up to date, StorageFailed,
    TierSettings."""
    await check_database(settings)
    database = Database(settings.sqlalchemy_url)
    try:
        async with database.reading() as uow:
            document_ids = await uow.documents.ids()
            turn_ids = await uow.turns.kv_in_use()
    finally:
        await database.close()

    def is_known(key: SnapshotKey) -> bool:
        return key.id in (turn_ids if key.kind == "turn" else document_ids)

    store = open_store(settings.store_dir, tier_config(settings), uploads=False)
    try:
        return await asyncio.to_thread(reconcile, store, is_known, dry_run=dry_run)
    finally:
        store.close()
