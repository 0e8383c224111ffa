"""After a change of model, template or KV type: how much is to be read again, and reading it in the background.

A document with an old snapshot answers all the same: the first question has it read again at once. What is done here
spares that question the time.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from cache_store.fingerprint import Fingerprint
from cache_store.keys import EntryName
from cache_store.store import SnapshotStore
from cache_store.tiers.opening import open_store
from service.core.background import Background
from service.core.own_database import check_database
from service.core.snapshot_tier import tier_config
from service.core.snapshots import Snapshots
from service.db.engine import Database, opening
from service.db.repositories.rebuilds import Outdated
from service.engine.models.card import expected_fields
from service.engine.protocol import EngineClient
from service.errors import Invalid, ServiceError
from service.settings import Settings

_PAUSE_S = 5.0
_log = structlog.get_logger("preread.rebuilding")


@dataclass(frozen=True, slots=True)
class RebuildPlan:
    """Documents with an old snapshot, those asked about last first. `tokens_per_s`: the measured speed of prefill, None
    where none was measured. `n_marked`: how many are read again in the background from now on."""

    documents: Sequence[Outdated]
    tokens_per_s: float | None
    n_marked: int = 0

    @property
    def n_tokens(self) -> int:
        return sum(document.n_tokens for document in self.documents)

    @property
    def hours(self) -> float | None:
        """How long reading all of them takes."""
        return self.n_tokens / self.tokens_per_s / 3600 if self.tokens_per_s else None


async def plan_rebuild(settings: Settings, *, dry_run: bool) -> RebuildPlan:
    """What the model that the settings name would have to read again; marked for that, unless `dry_run`. A server may
    run meanwhile. Raises ModelError, ServiceError, StorageFailed, TierSettings."""
    await check_database(settings)
    store = open_store(settings.store_dir, tier_config(settings), uploads=False)
    with opening():
        database = Database(settings.sqlalchemy_url)
    try:
        if settings.fleet_url and store.marks.served is None:
            raise Invalid(
                f"No worker has run in {settings.data_dir}, and only there is it known which snapshots are old: run "
                "this with PREREAD_DATA_DIR of a worker, and with PREREAD_DATABASE_URL.",
                code="no_worker",
            )
        async with database.reading() as uow:
            fresh = await asyncio.to_thread(_fresh, store, settings, await uow.rebuilds.fingerprints())
            documents = await uow.rebuilds.outdated(fresh)
        plan = RebuildPlan(documents, store.speeds.prefill)
        if dry_run or not documents:
            return plan
        async with database.writing() as uow:
            n_marked = await uow.rebuilds.mark([document.id for document in documents])
        return RebuildPlan(documents, plan.tokens_per_s, n_marked)
    finally:
        await database.close()
        store.close()


class Rebuilder(Background):
    """A background task that has documents read again that are marked for it, one at a time, those asked about last
    first. One that fails is left to the next question, which says why."""

    def __init__(self, db: Database, engine: EngineClient, snapshots: Snapshots, interval_s: float) -> None:
        self._db = db
        self._engine = engine
        self._snapshots = snapshots
        self._interval_s = interval_s
        self._failed: set[str] = set()

    async def _run(self) -> None:
        while True:
            try:
                while await self.rebuild_one():
                    pass
            except Exception as error:
                _log.error("documents are not read again", exc_info=error)
            await asyncio.sleep(self._interval_s)

    async def rebuild_one(self) -> bool:
        """Read the next document again; False when there is none."""
        async with self._db.reading() as uow:
            wanted = await uow.rebuilds.wanted(self._engine.info.fingerprint_digest)
        document_id = next((one.id for one in wanted if one.id not in self._failed), None)
        if document_id is None:
            return False
        async with self._db.writing() as uow:
            claimed = await uow.rebuilds.claim(document_id)
        if claimed:
            await self._rebuild(document_id)
        return True

    async def _rebuild(self, document_id: str) -> None:
        try:
            done = await self._snapshots.rebuild(document_id)
        except ServiceError as error:
            self._failed.add(document_id)
            _log.warning("a document is not read again", document_id=document_id, code=error.code, detail=error.detail)
            await asyncio.sleep(_PAUSE_S)
        else:
            _log.info("document read again", document_id=document_id, tokens=done.prefilled_tokens)


def _fresh(store: SnapshotStore, settings: Settings, digests: set[str]) -> set[str]:
    """Of these digests, and the one served last, those of fingerprints that go with the settings. What no engine but
    the one that runs knows, such as the version of its numerics, is that of the one served last."""
    served = store.marks.served
    if settings.engine == "fake":
        return {served} if served else set()
    expected = expected_fields(settings.model_dir, settings.kv_type)
    known = {digest: _matches(stored, expected) for digest, stored in _stored(store, digests | {served or ""}).items()}
    if served is not None and known.get(served, True):
        return {served}
    return {digest for digest, matches in known.items() if matches}


def _matches(stored: Fingerprint, expected: dict[str, str]) -> bool:
    return all(getattr(stored, name) == value for name, value in expected.items())


def _stored(store: SnapshotStore, digests: set[str]) -> dict[str, Fingerprint]:
    """The fingerprints that snapshots on the disk have, by their digests; of others nothing is known."""
    found: dict[str, Fingerprint] = {}
    names: dict[str, EntryName] = {name.fingerprint_digest: name for name in store.names()}
    for digest in digests & names.keys():
        if (fingerprint := store.fingerprint_of(names[digest])) is not None:
            found[digest] = fingerprint
    return found
