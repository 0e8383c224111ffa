"""A real installation on one machine for `capacity --check`: servers, one API process, workers one by one."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import psutil

from cache_store.tiers.redis import PREFIX
from service.engine.fleet import keys
from tests.chaos.world import World
from tests.e2e.server import Server, until

WORDS = ("keeper", "lamp", "tower", "harbour", "storm", "ledger", "lens", "oil", "stair", "signal", "boat", "winter")


class Installation(World):
    """A `World` that begins with one worker and none to compare with."""

    def __enter__(self) -> "Installation":
        with ThreadPoolExecutor() as pool:
            for starting in [pool.submit(one.start) for one in (self.workers[0], self.apis[0])]:
                starting.result()
        self.n_running = 1
        return self

    @property
    def api(self) -> Server:
        return self.apis[0]

    def add_worker(self, queue_limit: int) -> None:
        """Start the next one, and wait until questions would go there. The API process starts again with its limit."""
        self.workers[self.n_running].start()
        self.api.stop()
        self.api.settings["queue_limit"] = queue_limit
        self.api.start()
        self.n_running += 1
        time.sleep(2 * float(self.workers[0].settings["fleet_heartbeat_s"]))

    def lose_disk(self) -> None:
        """Of the first worker, which starts again without what it had."""
        self.workers[0].stop()
        shutil.rmtree(self.workers[0].data_dir / "store")
        self.workers[0].start()
        time.sleep(2 * float(self.workers[0].settings["fleet_heartbeat_s"]))

    def empty_redis(self) -> None:
        """Of snapshots; who is there, and where documents are, stays."""
        client: Any = self.redis.client()
        for key in list(client.scan_iter(match=PREFIX.rstrip(":") + "*")):
            client.delete(key)
        client.close()

    def read(self, contents: list[bytes]) -> list[dict[str, Any]]:
        """The documents once they are read and every tier has them."""
        with ThreadPoolExecutor(8) as pool:
            ids = list(pool.map(lambda content: self.api.upload(content)["id"], contents))
        bodies = [self.api.until_ended(document_id) for document_id in ids]
        assert all(body["status"] == "ready" for body in bodies), bodies
        until(lambda: self._have_all(ids), "a tier did not get the documents", every_s=0.3)
        return bodies

    def delete(self, document_ids: list[str]) -> None:
        for document_id in document_ids:
            response = self.api.request("DELETE", f"/v1/documents/{document_id}")
            assert response.status_code < 300, response.text

    def homes(self, document_ids: list[str]) -> list[int]:
        """The number of the worker that read each document."""
        client: Any = self.redis.client()
        numbers = {worker.id: number for number, worker in enumerate(self.workers)}
        found = {key.decode().rpartition("/")[2]: key for key in client.scan_iter(match=keys.PREFIX + b"home:*")}
        homes = [numbers[client.zrevrange(found[each], 0, 0)[0].decode()] for each in document_ids]
        client.close()
        return homes

    def spent(self) -> dict[str, float]:
        """What was used so far: seconds of processor time of each kind of process, PostgreSQL's commits."""
        processes = {
            "api": [psutil.Process(self.api.pid)],
            "redis": [psutil.Process(self.redis.process.pid)],
            "postgres": _family(self.postgres.process.pid),
            "workers": [one for worker in self.workers[: self.n_running] for one in _family(worker.pid)],
        }
        spent = {kind: sum(map(_cpu_s, of)) for kind, of in processes.items()}
        commits = self.postgres.sql("SELECT sum(xact_commit) FROM pg_stat_database WHERE datname LIKE 'test_%'")
        return spent | {"commits": float(commits)}

    def _have_all(self, document_ids: list[str]) -> bool:
        """Whether Redis and the object store have the documents' snapshots."""
        client: Any = self.redis.client()
        held = {key.decode().rpartition("~")[2] for key in client.scan_iter(match=PREFIX + "*~document~*")}
        client.close()
        stored = {name.split("/")[-3] for name in self.s3.names() if name.endswith("manifest.json")}
        return set(document_ids) <= held & stored


def text(n_bytes: int, seed: int) -> bytes:
    """A document of about so many bytes, unlike any other from the first word on."""
    chance = Random(seed)
    words = f"Document {seed} of {chance.getrandbits(32):x}."
    while len(words) < n_bytes:
        words += " " + chance.choice(WORDS)
    return words[:n_bytes].encode()


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system
