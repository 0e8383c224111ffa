"""One server behind a real socket, with a fake engine, for all tests of a file; and clients that do not know it."""

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest

from service.core.adapters import Given
from service.core.prompts import fake_prompts
from service.core.services import Services
from service.engine.fake import FakeEngine
from service.serve import make_server
from service.settings import Settings

TEXT = "The safety officer is Bartholomew Kemp. The connection fee is 1,275 pounds.\n\n" * 3
REPLY = ("The connection ", "fee ", "is 1,275 pounds.")


@dataclass
class World:
    """A running server. `engine` is told from the test's thread what to do; `services` are for its event loop."""

    url: str
    engine: FakeEngine
    services: Services
    loop: asyncio.AbstractEventLoop

    def client(self, key: str = "none", **options) -> openai.OpenAI:
        """The package as anybody has it. Errors are told at once, not tried again."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": 30} | options)

    def http(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, verify=False, trust_env=False, **options)

    def call(self, coroutine):
        """What something in the server's event loop gives."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def until(self, condition, within_s: float = 60.0):
        """Wait for a condition; what it gives."""
        deadline = time.monotonic() + within_s
        while not (found := condition()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return found

    def file(self, text: str = TEXT, name: str = "contract.txt"):
        """A file that has been read."""
        client = self.client()
        file = client.files.create(file=(name, text.encode()), purpose="user_data")
        self.until(lambda: client.files.retrieve(file.id).status == "processed")
        return file


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    yield from running(tmp_path_factory.mktemp("openai"))


@pytest.fixture(scope="module")
def small_world(tmp_path_factory) -> Iterator[World]:
    """A server that knows texts of 100 tokens again, and where what one session holds is small."""
    engine = FakeEngine(REPLY, max_context=20_000, tail_tokens=4000)
    yield from running(tmp_path_factory.mktemp("openai-small"), engine, prompt_tokens=100, prompt_repeats=2)


def running(root, engine: FakeEngine | None = None, **changes) -> Iterator[World]:
    engine = engine or FakeEngine(REPLY, max_context=20_000)
    own = {"port": 0, "engine": "fake", "free_floor_bytes": 0, "answer_room_tokens": 64, "sse_heartbeat_s": 0.1}
    settings = Settings(data_dir=root / "data", **own | changes)
    server, listening = make_server(settings, Given(engine=engine, prompts=fake_prompts()))
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listening])

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        port = listening.getsockname()[1]
        yield World(f"http://127.0.0.1:{port}", engine, server.app.state.services, loops[0])
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
