"""One server for the tests of a file, and the client that asks it."""

import pytest

from service.client import Client
from service.engine.fake import FakeEngine
from service.settings import Settings
from tests.service.conftest import Reader
from tests.service.live import live_server, without_logs

TEXT = b"The safety officer is Bartholomew Kemp. The fee is 1,275 pounds.\fThe second page is empty but for this.\n"
PIECES = [f"{number} " for number in range(150)]
"""An answer in which a lost or doubled piece shows."""


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    settings = Settings(
        data_dir=tmp_path_factory.mktemp("live") / "data", engine="fake", free_floor_bytes=0, answer_room_tokens=64,
        sweep_interval_s=3600, sse_heartbeat_s=0.2, shutdown_grace_s=1, max_upload_bytes=1 << 20,
    )  # fmt: skip
    engine = FakeEngine(max_context=20_000)
    with without_logs(), live_server(settings, engine, read=Reader()) as live:
        yield live


@pytest.fixture(scope="module")
def client(live):
    with Client(live.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def document(client):
    """Two pages that were read."""
    return client.documents.wait(client.documents.upload(TEXT, filename="notes.txt").id, timeout_s=30)


@pytest.fixture
def session(client, document):
    return client.sessions.create(document.id)


@pytest.fixture
def counting(live):
    """Answers count to 149, in one and a half seconds at least."""
    kept = live.engine.reply, live.engine.token_delay_s
    live.engine.reply, live.engine.token_delay_s = PIECES, 0.01
    yield "".join(PIECES)
    live.engine.reply, live.engine.token_delay_s = kept
