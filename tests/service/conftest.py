"""A service over the fake engine, in this event loop or behind a real socket."""

import asyncio
import socket
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from sqlalchemy import make_url

import service.core.adapters as adapters
from ingest.model import Document, MediaType, Page
from service.app import create_app
from service.core.adapters import Given
from service.core.clock import FakeClock
from service.core.key_ring import KeyRing
from service.core.prompts import fake_prompts
from service.engine.fake import FakeEngine
from service.settings import Settings
from tests.migrated import place
from tests.service import reading
from tests.service.fake_store import Store


@pytest.fixture(scope="session", autouse=True)
def quick_starts():
    """A new data directory gets a database that is at the head already, and plain text is read here."""
    upgrade = adapters.upgrade

    async def copied(url):
        place(Path(make_url(url).database))
        await upgrade(url)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "upgrade", copied)
        patch.setattr(adapters, "parse", reading.parse)
        yield


@pytest.fixture
def settings(tmp_path):
    return Settings(
        data_dir=tmp_path / "data",
        engine="fake",
        free_floor_bytes=0,
        answer_room_tokens=64,
        sweep_interval_s=3600,
        sse_heartbeat_s=0.2,
    )


@pytest.fixture
def engine():
    return FakeEngine(max_context=20_000)


@pytest.fixture
def make_app(settings, engine):
    """Makes the application; `given` replaces parts of it, `changed` settings."""

    def make(changed=None, **given):
        used = settings.model_copy(update=changed or {})
        return create_app(used, Given(**{"engine": engine, "prompts": fake_prompts()} | given))

    return make


@pytest.fixture
def open_client(make_app):
    """Opens the API in this event loop (Litestar's own client has another); `client.services` are its parts."""

    @asynccontextmanager
    async def opened(changed=None, **given):
        app = make_app(changed, **given)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with app.lifespan(), httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            client.services = app.state.services
            yield client

    return opened


@pytest.fixture
async def client(anyio_backend, open_client):
    async with open_client() as client:
        yield client


@pytest.fixture
def serving(make_app):
    """Serves the API on a free port, in a thread; gives an httpx client and the application."""

    @contextmanager
    def started(changed=None, **given):
        app = make_app(changed, **given)
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:  # the socket takes connections before
            assert thread.is_alive()
            time.sleep(0.01)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            with httpx.Client(base_url=url, timeout=60, verify=False, trust_env=False) as client:
                yield client, app
        finally:
            server.should_exit = True
            thread.join(60)
            listening.close()

    return started


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def upload():
    """Posts a document."""

    async def post(client, data=b"The keeper is Marta Kovalenko. " * 30, name="notes.txt", **fields):
        return await client.post("/v1/documents", files={"file": (name, data)}, data=fields)

    return post


@pytest.fixture
def until():
    """Waits for a document to be in one of these states; its body."""

    async def wait(client, document_id, *statuses, timeout_s=60.0):
        async with asyncio.timeout(timeout_s):
            while True:
                body = (await client.get(f"/v1/documents/{document_id}")).json()
                if body["status"] in (statuses or ("ready", "failed", "cancelled")):
                    return body
                await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def until_ended(until):
    return until


@pytest.fixture
def eventually():
    """Waits for a condition."""

    async def wait(condition):
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def files_left(settings, eventually):
    """Names of the stored originals, once there are `count` of them: a failed document's goes after its status."""

    async def left(count=0):
        await eventually(lambda: len(list(settings.files_dir.iterdir())) == count)
        return sorted(path.name for path in settings.files_dir.iterdir())

    return left


@pytest.fixture
def made(upload, until):
    """A document that has ended, however it ended."""

    async def make(client, *args, **fields):
        response = await upload(client, *args, **fields)
        assert response.status_code == 202, response.text
        return await until(client, response.json()["id"])

    return make


class Reader:
    """Reads text without a parser process; pages are parted by form feeds. Waits while `gate` is closed."""

    def __init__(self):
        self.gate = asyncio.Event()
        self.gate.set()
        self.passwords = []

    async def __call__(self, path, *, password, on_progress):
        self.passwords.append(password)
        texts = path.read_text().split("\f")
        on_progress(0, len(texts))
        await self.gate.wait()
        on_progress(len(texts), len(texts))
        return Document(MediaType.TEXT, tuple(Page(n, None, text) for n, text in enumerate(texts, 1)))


@pytest.fixture
def reader():
    return Reader()


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def person():
    """Makes a key, and gives a client's headers with it. From then on the server wants keys."""

    async def make(services, user="ann", organization="acme", scopes=("manage",), ttl_s=None):
        ring = KeyRing(services.db, services.clock)
        made, token = await ring.create(user=user, organization=organization, scopes=scopes, ttl_s=ttl_s)
        services.keys.look_again()
        return Person(made, {"Authorization": f"Bearer {token}"})

    return make


class Person:
    """A key, and the headers of whoever has it."""

    def __init__(self, made, headers):
        self.key_id = made.row.id
        self.user_id = made.row.user_id
        self.headers = headers
