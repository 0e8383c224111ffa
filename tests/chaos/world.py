"""An installation of real processes to be hurt: API processes, workers, PostgreSQL, Redis, an object store."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from service.db.migrations import upgrade
from tests.cache_store.tiers.proxy import Proxy
from tests.cache_store.tiers.servers import RedisServer, S3Server
from tests.e2e.fleet import WorkerProcess
from tests.e2e.server import START_S, Server, until
from tests.postgres import PostgresServer

FAKE = {"fake_from_kv": True, "fake_layer_s": 0.02, "fake_step_s": 0.01}
"""Answers follow from the stored bytes: a wrong byte anywhere is another answer."""
HEARTBEAT_S = 0.4
LEASE_S = 1.5
ENGINE_TIMEOUT_S = 3.0


class World:
    """A context manager; `until_whole` waits until everything answers. `reference` is one process with an engine of its
    own, which nothing happens to: what it answers is right. `model`: the directory of one for the torch engine to
    compute with, instead of a fake engine with the options `fake`. `settings` are those of all processes."""

    def __init__(
        self,
        directory: Path,
        *,
        n_apis: int = 2,
        n_workers: int = 2,
        model: str = "",
        fake: dict[str, Any] = FAKE,
        **settings: Any,
    ) -> None:
        self.directory = directory
        self.postgres, self.redis, self.s3 = PostgresServer(), RedisServer(directory), S3Server()
        self.proxy = Proxy(self.s3.endpoint)
        environment = self.s3.environment | {"AWS_ENDPOINT": self.proxy.endpoint}
        self._environment = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        asyncio.run(upgrade(url := self.postgres.new_database()))
        torch: dict[str, Any] = {"engine": "torch", "model": model, "compute_dtype": "float32", "threads": 1}
        engine: dict[str, Any] = torch if model else {"engine": "fake"}
        own, alone = (None, None) if model else (fake, {"fake_from_kv": True})
        shared: dict[str, Any] = {
            "fleet_url": self.redis.url, "fleet_heartbeat_s": HEARTBEAT_S, "worker_grace_s": 10,
            "redis_url": self.redis.url, "object_url": self.s3.url,
            "lease_s": LEASE_S, "sweep_interval_s": 2, "engine_timeout_s": ENGINE_TIMEOUT_S, **engine, **settings,
        }  # fmt: skip
        serving = shared | {"database_url": url}
        self.apis = [Server(directory / "api", name=f"-{n}", **serving) for n in range(n_apis)]
        self.workers = [WorkerProcess(directory / f"worker-{n}", fake=own, **shared) for n in range(n_workers)]
        self.reference = Server(directory / "reference", fake=alone, **engine)

    def __enter__(self) -> "World":
        with ThreadPoolExecutor() as pool:
            started = [pool.submit(one.start) for one in (self.reference, *self.workers, *self.apis)]
            for future in started:
                future.result()
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for close in (
                self._restore_environment,
                self.postgres.close,
                self.redis.kill,
                self.s3.close,
                self.proxy.close,
            ):
                stack.callback(close)
            for one in (*self.workers, *self.apis, self.reference):
                stack.push(one.__exit__)

    def until_whole(self) -> None:
        """Every part answers; what was stopped was started again by who stopped it."""
        for api in self.apis:
            until(lambda api=api: _is_ready(api), "an API process is not ready", START_S, every_s=0.1)

    def _restore_environment(self) -> None:
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _is_ready(api: Server) -> bool:
    return api.get("/health/ready").status_code == 200
