"""An installation of real processes to be hurt: API processes, workers, PostgreSQL, Redis, an object store."""

import asyncio
import json
import os
import shutil
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from service.db.migrations import upgrade
from tests.cache_store.tiers.proxy import Proxy
from tests.cache_store.tiers.servers import RedisServer, S3Server
from tests.chaos.clocks import MovableClock
from tests.chaos.wire import Wire
from tests.e2e.fleet import WorkerProcess
from tests.e2e.server import START_S, Server, until
from tests.e2e.small_disk import SmallDisk, small_disk
from tests.postgres import PostgresServer

FAKE = {"fake_from_kv": True, "fake_layer_s": 0.02, "fake_step_s": 0.01}
"""Answers follow from the stored bytes: a wrong byte anywhere is another answer."""
HEARTBEAT_S = 0.4
LEASE_S = 1.5
ENGINE_TIMEOUT_S = 3.0
DISK_NBYTES = 256 << 20
_MIGRATING = threading.Lock()
"""Alembic migrates one database at a time in a process."""


class World:
    """A context manager; `until_whole` waits until everything answers. `reference` is one process with an engine of its
    own, which nothing happens to: what it answers is right. `model`: the directory of one for the torch engine to
    compute with, instead of a fake engine with the options `fake`. `settings` are those of all processes.

    All connections to servers go through a `Wire`, and those to the object store through `proxy` too. The clock of the
    world of each process can be moved, its disk can be filled. `stall_s`: how long what stands still does so.
    """

    def __init__(
        self,
        directory: Path,
        *,
        n_apis: int = 2,
        n_workers: int = 2,
        model: str = "",
        fake: dict[str, Any] = FAKE,
        stall_s: float = 3.0,
        **settings: Any,
    ) -> None:
        self.directory = directory
        self.stall_s = stall_s
        self._disks = ExitStack()
        self.postgres_disk = self._disk_of_postgres()
        self.postgres, self.redis, self.s3 = PostgresServer(self.postgres_disk.path), RedisServer(directory), S3Server()
        self.proxy = Proxy(self.s3.endpoint)
        self.wires = {
            "redis": Wire(self.redis.port),
            "postgres": Wire(self.postgres.port),
            "object": Wire(self.proxy.server.server_port),
        }
        url = self.postgres.new_database().replace(f":{self.postgres.port}/", f":{self.wires['postgres'].port}/")
        with _MIGRATING:
            asyncio.run(upgrade(url))
        torch: dict[str, Any] = {"engine": "torch", "model": model, "compute_dtype": "float32", "threads": 1}
        engine: dict[str, Any] = torch if model else {"engine": "fake"}
        own, alone = (None, None) if model else (fake, {"fake_from_kv": True})
        redis = f"redis://127.0.0.1:{self.wires['redis'].port}/0"
        shared: dict[str, Any] = {
            "fleet_url": redis, "fleet_heartbeat_s": HEARTBEAT_S, "worker_grace_s": 10,
            "redis_url": redis, "object_url": self.s3.url,
            "lease_s": LEASE_S, "sweep_interval_s": 2, "engine_timeout_s": ENGINE_TIMEOUT_S, **engine, **settings,
        }  # fmt: skip
        serving = shared | {"database_url": url}
        names = ["api", *(f"worker-{n}" for n in range(n_workers))]
        disks = [self._disks.enter_context(small_disk(directory / name, DISK_NBYTES)) for name in names]
        self.apis = [Server(directory / "api", name=f"-{n}", **serving) for n in range(n_apis)]
        self.workers = [WorkerProcess(directory / f"worker-{n}", fake=own, **shared) for n in range(n_workers)]
        self.disks: dict[Server | WorkerProcess, SmallDisk] = dict.fromkeys(self.apis, disks[0])
        self.disks |= dict(zip(self.workers, disks[1:], strict=True))
        store = self.s3.environment | {"AWS_ENDPOINT": f"http://127.0.0.1:{self.wires['object'].port}"}
        self.clocks: dict[Server | WorkerProcess, MovableClock] = {}
        for n, one in enumerate((*self.apis, *self.workers)):
            self.clocks[one] = MovableClock(directory / f"clock-{n}")
            one.more = store | self.clocks[one].environment
        self.reference = Server(directory / "reference", fake=alone, **engine)
        self._read: Counter[str] = Counter()
        self._seen: dict[Path, int] = {}

    def __enter__(self) -> "World":
        with ThreadPoolExecutor() as pool:
            started = [pool.submit(one.start) for one in (self.reference, *self.workers, *self.apis)]
            for future in started:
                future.result()
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for close in (
                self._disks.close,
                self.postgres.close,
                self.redis.kill,
                self.s3.close,
                self.proxy.close,
                *(wire.close for wire in self.wires.values()),
            ):
                stack.callback(close)
            for one in (*self.workers, *self.apis, self.reference):
                stack.push(one.__exit__)

    def _disk_of_postgres(self) -> SmallDisk:
        """Which another user than this one writes to."""
        above = Path(tempfile.mkdtemp(prefix="preread-postgres-disk-"))
        self._disks.callback(shutil.rmtree, above, ignore_errors=True)
        disk = self._disks.enter_context(small_disk(above / "disk", DISK_NBYTES))
        for path in (above, disk.path):
            path.chmod(0o711)
        if os.getuid() == 0:
            shutil.chown(disk.path, "postgres")
        return disk

    def until_whole(self) -> None:
        """Every part answers; what was stopped was started again by who stopped it."""
        for api in self.apis:
            until(lambda api=api: _is_ready(api), "an API process is not ready", START_S, every_s=0.1)

    def n_read(self) -> Counter[str]:
        """By document, how often its prefill was brought to an end, as the workers' logs say."""
        for worker in self.workers:
            with worker.log_path.open("rb") as file:
                file.seek(self._seen.get(worker.log_path, 0))
                lines = file.read().rpartition(b"\n")[0]
                self._seen[worker.log_path] = self._seen.get(worker.log_path, 0) + len(lines)
            for line in lines.splitlines():
                if b'"document read"' in line:
                    self._read[json.loads(line)["run"].split("_")[2]] += 1
        return self._read


def _is_ready(api: Server) -> bool:
    return api.get("/health/ready").status_code == 200
