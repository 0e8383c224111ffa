"""The API behind a real socket, in a thread of its own: what an in-process client cannot show."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import structlog

from service.core.adapters import Given
from service.core.prompts import fake_prompts
from service.core.services import Services
from service.engine.fake import FakeEngine
from service.serve import Server, make_server
from service.settings import Settings

TEXT = b"The safety officer is Bartholomew Kemp. The connection fee is 1,275 pounds.\n\n" * 3


@dataclass
class Live:
    """A running server. `engine` may be told what to do from the test's thread."""

    url: str
    engine: FakeEngine
    services: Services
    loop: asyncio.AbstractEventLoop

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, verify=False, trust_env=False, **options)

    def soon(self, call: Callable[[], object]) -> None:
        """Run something in the server's event loop."""
        self.loop.call_soon_threadsafe(call)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What a coroutine gives that runs in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def document(self) -> str:
        """A document that is ready."""
        with self.client() as client:
            document_id = client.post("/v1/documents", files={"file": ("a.txt", TEXT)}).json()["id"]
            deadline = time.monotonic() + 60
            while client.get(f"/v1/documents/{document_id}").json()["status"] != "ready":
                assert time.monotonic() < deadline
                time.sleep(0.02)
        return document_id

    def session(self, document_id: str) -> str:
        with self.client() as client:
            return client.post("/v1/sessions", json={"document_ids": [document_id]}).json()["id"]


@contextmanager
def without_logs() -> Iterator[None]:
    """For a server in the process of a command whose output is looked at."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@contextmanager
def live_server(settings: Settings, engine: FakeEngine | None = None, **given: Any) -> Iterator[Live]:
    """Serves with a fake engine on a free port, until the end of the block; `given` are other parts."""
    engine = engine or FakeEngine(max_context=20_000)
    own = Settings(**{**settings.model_dump(), "host": "127.0.0.1", "port": 0})
    server, listening = make_server(own, Given(engine=engine, prompts=fake_prompts(), **given))
    loops: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=_run, args=(server, listening, loops), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        port = listening.getsockname()[1]
        yield Live(f"http://127.0.0.1:{port}", engine, server.app.state.services, loops[0])
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def _run(server: Server, listening: socket.socket, loops: list[asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listening])

    asyncio.run(main())
