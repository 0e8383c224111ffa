"""A fleet in this event loop: workers over engines of their own, clients, and a real Redis between them."""

import asyncio

import pytest

from service.engine.digests import digest_of
from service.engine.fake import FakeEngine
from service.engine.fleet.client import FleetClient
from service.engine.fleet.worker import FleetWorker, Place
from service.engine.messages import AnswerRequest, BuildRequest, DocumentRef, Sampling

HEARTBEAT_S = 0.5
DOC = DocumentRef("own", "doc")
TOKENS = [i % 250 for i in range(600)]


class Fleet:
    """Makes workers and clients, and ends them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engines: dict[str, FakeEngine] = {}
        self.workers: dict[str, FleetWorker] = {}
        self._stops: dict[str, tuple[asyncio.Event, asyncio.Task]] = {}
        self._clients: list[FleetClient] = []

    async def worker(self, name: str, engine: FakeEngine | None = None, grace_s: float = 5.0, **place) -> FakeEngine:
        engine = self.engines[name] = engine or FakeEngine(token_delay_s=0.002)
        worker = self.workers[name] = FleetWorker(self.url, engine, Place(name, heartbeat_s=HEARTBEAT_S, **place))
        stop = asyncio.Event()
        self._stops[name] = stop, asyncio.create_task(worker.run(stop, grace_s))
        return engine

    async def client(self) -> FleetClient:
        client = FleetClient(self.url, heartbeat_s=HEARTBEAT_S)
        self._clients.append(client)
        await client.start(20.0)
        await until(lambda: len(client.workers) >= len(self._stops))
        return client

    def draining(self, name: str) -> asyncio.Task:
        """Tell a worker to stop; its end."""
        stop, task = self._stops[name]
        stop.set()
        return task

    def task(self, name: str) -> asyncio.Task:
        """What runs a worker."""
        return self._stops[name][1]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        for name in self._stops:
            self.draining(name)
        await asyncio.gather(*(task for _, task in self._stops.values()), return_exceptions=True)


@pytest.fixture
async def fleet(redis_server):
    made = Fleet(redis_server.url)
    yield made
    await made.close()


def ask(name: str = "a", document: DocumentRef = DOC, session: str = "s", max_tokens: int = 1000) -> AnswerRequest:
    return AnswerRequest(
        name, session, document, digest_of(TOKENS), len(TOKENS), [], [1, 2], Sampling(max_tokens), f"kv-{name}"
    )


async def every(events) -> list:
    return [event async for event in events]


async def build(client, document: DocumentRef = DOC, name: str = "b") -> list:
    return await every(client.build(BuildRequest(name, document, TOKENS)))


def text_of(events: list) -> str:
    return "".join(getattr(event, "text", "") for event in events)


async def until(condition, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
