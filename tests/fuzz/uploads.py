"""Damaged files through the API, several at once: each ends in time with its reason, and nothing is left of it."""

import asyncio
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil

from tests.e2e.server import FINAL, files_below
from tests.fuzz.mutations import damaged
from tests.fuzz.seeds import NAMES

AT_ONCE = 4
REFUSED_AT_ONCE = frozenset({413, 415, 422})
FAULTS = frozenset({"internal_error", "parser_crashed"})
"""How no document may end: something of ours fell over, though nobody else noticed."""
ASKED = 0.1
STOPPED = 0.04
KEPT = 0.3
"""Shares of the documents: asked a question, cancelled or deleted while they are read, not deleted before the end."""
_BOOKS = frozenset({"served", "speeds.json", "usage", "store.lock"})
"""Of the store itself."""


@dataclass
class Tally:
    """`outcomes` by (format, how it ended); `failures` say how each is repeated."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: dict[str, float] = field(default_factory=dict)
    questions: int = 0
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return self.outcomes.total()


@dataclass(frozen=True)
class Case:
    """File `number` of a format."""

    format_name: str
    seed: int
    number: int

    @property
    def data(self) -> bytes:
        return damaged(self.format_name, self.seed, self.number)

    def __str__(self) -> str:
        return f"{self.format_name}:{self.seed}:{self.number}"


def cases(total: int, seed: int, formats: tuple[str, ...] = tuple(NAMES)) -> list[Case]:
    """`total` in all, those of each format in turn."""
    return [Case(formats[n % len(formats)], seed, n // len(formats)) for n in range(total)]


async def upload_all(
    url: str, todo: list[Case], *, limit_s: float, until: float | None = None, keep: Path | None = None
) -> Tally:
    """Uploads all cases, or those that are begun before `until` (`time.monotonic`). Each has `limit_s` once its turn
    has come. Files of failures are written below `keep`."""
    tally, left = Tally(), iter(todo)
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=limit_s, trust_env=False) as client:
        uploader = Uploader(client, tally, limit_s * (AT_ONCE + 1), keep)

        async def work() -> None:
            for case in left:
                if until is not None and time.monotonic() > until:
                    return
                await uploader.take(case)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        await uploader.delete_rest()
    tally.seconds = time.monotonic() - began
    return tally


class Uploader:
    """One client with all its documents."""

    def __init__(self, client: httpx.AsyncClient, tally: Tally, limit_s: float, keep: Path | None) -> None:
        self._client = client
        self._tally = tally
        self._limit_s = limit_s
        self._keep = keep
        self._rest: list[str] = []

    async def take(self, case: Case) -> None:
        """Upload, wait, look at what came of it, and mostly delete it."""
        began = time.monotonic()
        try:
            data = await asyncio.to_thread(lambda: case.data)
            outcome = await self._outcome(case, data, Random(f"way {case}"))
        except (AssertionError, httpx.HTTPError) as error:
            outcome = "WRONG"
            self._fail(case, f"{type(error).__name__}: {error}")
        tally, took = self._tally, time.monotonic() - began
        tally.outcomes[case.format_name, outcome] += 1
        tally.slowest[case.format_name] = max(tally.slowest.get(case.format_name, 0.0), took)

    async def _outcome(self, case: Case, data: bytes, random: Random) -> str:
        name = f"{case.number}.{NAMES[case.format_name]}"
        response = await self._client.post("/v1/documents", files={"file": (name, data)})
        body = response.json()
        if response.status_code in REFUSED_AT_ONCE:
            return f"refused: {body['error']['code']}"
        if response.status_code == 200:
            return "the bytes of another"  # whose turn it is to look at it and to delete it
        assert response.status_code == 202, f"{response.status_code} {response.text[:300]}"
        if random.random() < STOPPED:
            return await self._stop(body["id"], random)
        body = await self._ended(body["id"])
        if body["status"] == "ready":
            await self._use(body, random)
            outcome = "ready"
        else:
            assert body["error"], body
            assert body["error"]["message"], body
            assert body["error"]["code"] not in FAULTS, body["error"]
            outcome = f"failed: {body['error']['code']}"
        if random.random() < KEPT:
            self._rest.append(body["id"])
        else:
            await self._delete(body["id"])
        return outcome

    async def _ended(self, document_id: str) -> dict[str, Any]:
        began = time.monotonic()
        while True:
            response = await self._client.get(f"/v1/documents/{document_id}")
            assert response.status_code == 200, f"{response.status_code} {response.text[:300]}"
            body, waited_s = response.json(), time.monotonic() - began
            if body["status"] in FINAL:
                return body
            assert waited_s < self._limit_s, f"{body['status']} after {waited_s:.0f} s"
            await asyncio.sleep(min(0.5, 0.05 + waited_s / 10))

    async def _use(self, body: dict[str, Any], random: Random) -> None:
        """A document that was read has its pages, and can be asked."""
        for number in {1, body["page_count"]}:
            page = await self._client.get(f"/v1/documents/{body['id']}/pages/{number}")
            assert page.status_code == 200, f"page {number}: {page.status_code} {page.text[:300]}"
        if random.random() < ASKED:
            made = await self._client.post("/v1/sessions", json={"document_ids": [body["id"]]})
            assert made.status_code == 201, f"{made.status_code} {made.text[:300]}"
            asked = await self._client.post(f"/v1/sessions/{made.json()['id']}/questions", json={"question": "Who?"})
            assert asked.status_code == 200, f"{asked.status_code} {asked.text[:300]}"
            self._tally.questions += 1

    async def _stop(self, document_id: str, random: Random) -> str:
        await asyncio.sleep(random.random() * 0.5)
        if random.random() < 0.5:
            await self._delete(document_id)
            return "deleted while it was read"
        response = await self._client.post(f"/v1/documents/{document_id}/cancel")
        assert response.status_code in (200, 409), f"{response.status_code} {response.text[:300]}"
        await self._ended(document_id)
        await self._delete(document_id)
        return "cancelled"

    async def delete_rest(self) -> None:
        for document_id in self._rest:
            await self._delete(document_id)

    async def _delete(self, document_id: str) -> None:
        response = await self._client.delete(f"/v1/documents/{document_id}")
        assert response.status_code == 200, f"{response.status_code} {response.text[:300]}"

    def _fail(self, case: Case, why: str) -> None:
        kept = ""
        if self._keep is not None:
            self._keep.mkdir(parents=True, exist_ok=True)
            path = self._keep / f"{str(case).replace(':', '-')}.{NAMES[case.format_name]}"
            path.write_bytes(case.data)
            kept = f" ({path})"
        self._tally.failures.append(f"{case}{kept}: {why}")
        print(self._tally.failures[-1], file=sys.stderr, flush=True)


def leftovers(data_dir: Path) -> list[str]:
    """What is there of documents once all were deleted and the server has ended: files, and rows."""
    found = [f"files/{name}" for name in files_below(data_dir / "files")]
    found += [f"store/{name}" for name in files_below(data_dir / "store") if name not in _BOOKS]
    with sqlite3.connect(data_dir / "preread.sqlite3") as database:
        for table in ("documents", "pages", "sessions", "session_documents", "turns", "deletions"):
            if count := database.execute(f"select count(*) from {table}").fetchone()[0]:
                found.append(f"{count} rows of {table}")
    return found


@dataclass
class Watched:
    """Most memory of processes, in bytes: the server's own, the engine's, and of one that reads a document."""

    server_before: int = 0
    server: int = 0
    engine: int = 0
    reader: int = 0
    most_readers: int = 0


@contextmanager
def watched(pid: int, engine_pid: int) -> Iterator[Watched]:
    """Looks at the processes below a server five times a second."""
    seen, over = Watched(), threading.Event()
    server = psutil.Process(pid)
    seen.server_before = server.memory_info().rss

    def look() -> None:
        while not over.wait(0.2):
            readers = 0
            seen.server = max(seen.server, server.memory_info().rss)
            for child in server.children():
                try:
                    nbytes = child.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
                if child.pid == engine_pid:
                    seen.engine = max(seen.engine, nbytes)
                else:
                    readers += 1
                    seen.reader = max(seen.reader, nbytes)
            seen.most_readers = max(seen.most_readers, readers)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
