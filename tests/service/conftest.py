"""A service over the fake engine, with files of its own."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from litestar.testing import AsyncTestClient

from service.app import create_app
from service.core.adapters import Given
from service.core.clock import FakeClock
from service.core.prompts import fake_prompts
from service.engine.fake import FakeEngine
from service.settings import Settings


@pytest.fixture
def settings(tmp_path):
    return Settings(
        data_dir=tmp_path / "data",
        engine="fake",
        free_floor_bytes=0,
        answer_room_tokens=64,
        sweep_interval_s=3600,
    )


@pytest.fixture
def engine():
    return FakeEngine(max_context=20_000)


@pytest.fixture
def open_client(settings, engine):
    """Opens the API in this event loop; `given` replaces parts of it."""

    @asynccontextmanager
    async def opened(settings=settings, **given):
        app = create_app(settings, Given(**{"engine": engine, "prompts": fake_prompts()} | given))
        async with AsyncTestClient(app, raise_server_exceptions=False) as client:
            yield client

    return opened


@pytest.fixture
async def client(anyio_backend, open_client):
    async with open_client() as client:
        yield client


@pytest.fixture
def clock():
    return FakeClock()


async def until_ended(client, document_id, *, timeout_s=20.0):
    """The document once its status is final."""
    async with asyncio.timeout(timeout_s):
        while True:
            body = (await client.get(f"/v1/documents/{document_id}")).json()
            if body["status"] in {"ready", "failed", "cancelled"}:
                return body
            await asyncio.sleep(0.02)


@pytest.fixture(name="until_ended")
def until_ended_fixture():
    return until_ended
