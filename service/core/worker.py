"""`preread worker`: a supervised engine, served to the API processes of a fleet."""

import asyncio
import shutil
import signal
import socket
import sys
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

from cache_store.disk import replace_text
from service.core import datadir
from service.core.engines import engine_config
from service.core.snapshot_tier import StoredSnapshots, tier_config
from service.engine.fleet.worker import FleetWorker, Place
from service.engine.protocol import EngineLost
from service.engine.remote.supervisor import EngineSupervisor
from service.errors import Invalid
from service.settings import Settings

WATCH_S = 1.0


async def run_worker(settings: Settings, engine: EngineSupervisor | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then let open requests end for `worker_grace_s`. An engine that is given must have
    started; it is closed.

    Raises Invalid without a fleet, Conflict when another worker uses the data directory, EngineLost when the engine
    cannot be kept running, FleetSettings and TierSettings for addresses that are none.
    """
    if not settings.fleet_url:
        raise Invalid("A worker needs a fleet: set PREREAD_FLEET_URL to its Redis.", param="fleet_url")
    datadir.prepare(settings)
    async with AsyncExitStack() as stack:
        stack.enter_context(datadir.lock(settings.data_dir, "worker"))
        engine = engine or EngineSupervisor(engine_config(settings), silent_s=settings.engine_timeout_s)
        stack.push_async_callback(engine.close)
        worker = FleetWorker(settings.fleet_url, engine, _place(settings))
        stop = _stopped_by_signals()
        if not engine.alive:
            await engine.start()
        watch = asyncio.create_task(_given_up(engine, stop))
        sys.stderr.write(f"Preread worker {worker_id(settings.data_dir)} serves {engine.info.model_name}\n")
        await worker.run(stop, settings.worker_grace_s)
        watch.cancel()
        if engine.failure is not None:
            raise EngineLost(engine.failure)


def _place(settings: Settings) -> Place:
    store = StoredSnapshots(settings.store_dir, tier_config(settings))
    return Place(
        worker_id(settings.data_dir),
        heartbeat_s=settings.fleet_heartbeat_s,
        shares=bool(settings.redis_url or settings.object_url),
        free_nbytes=lambda: shutil.disk_usage(settings.store_dir).free,
        delete=store.delete,
        deletions=settings.data_dir / "worker.deletions",
        pin_only=store.pin_only,
    )


def worker_id(data_dir: Path) -> str:
    """The same after a restart: it stands for what is on this disk."""
    path = data_dir / "worker.id"
    if not path.exists() or not path.read_text().strip():  # an empty one would be that of others too
        replace_text(path, uuid.uuid4().hex[:8])
    return f"{socket.gethostname()}-{path.read_text().strip()}"


def _stopped_by_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _given_up(engine: EngineSupervisor, stop: asyncio.Event) -> None:
    """A worker whose engine is not started any more ends, so that somebody looks after it."""
    while engine.failure is None:  # noqa: ASYNC110 - the supervisor has no event for it
        await asyncio.sleep(WATCH_S)
    stop.set()
