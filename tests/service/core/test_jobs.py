"""Documents survive the server and the engine: what was begun is finished, once, or ends with a reason."""

import asyncio

import pytest

from service.core import builds
from service.core.progress import Progress
from service.engine.fake import FakeEngine
from service.engine.messages import Failed
from service.errors import StorageFull
from tests.service.fake_store import Store

PAGES = "\f".join(f"Page {n} says that the fee is {n}00 pounds. " * 20 for n in range(1, 6)).encode()
LOST = Failed("engine_lost", "gone", retryable=True)


@pytest.mark.anyio
async def test_a_restart_while_parsing_parses_again(open_client, upload, until, reader, engine):
    reader.gate.clear()
    async with open_client(read=reader) as client:
        document_id = (await upload(client, PAGES)).json()["id"]
        await until(client, document_id, "parsing")
    reader.gate.set()
    async with open_client(read=reader) as client:
        body = await until(client, document_id)
    assert (body["status"], body["page_count"]) == ("ready", 5)
    assert len(engine.built) == 1


@pytest.mark.anyio
async def test_a_restart_while_prefilling_goes_on_with_the_same_tokens(open_client, upload, until, reader, eventually):
    engine = FakeEngine(max_context=20_000, chunk_delay_s=60)
    async with open_client(read=reader, engine=engine) as client:
        document_id = (await upload(client, PAGES)).json()["id"]
        body = await until(client, document_id, "prefilling")
        assert body["snapshot"]["state"] == "building"
        await eventually(lambda: engine.built)
    engine.chunk_delay_s = 0.0
    async with open_client(read=reader, engine=engine) as client:
        assert (await until(client, document_id))["status"] == "ready"
    first, second = engine.built
    assert first.token_ids == second.token_ids
    assert reader.passwords == [None]


@pytest.mark.anyio
async def test_queued_documents_wait_their_turn_and_survive(open_client, upload, until, reader):
    reader.gate.clear()
    async with open_client(read=reader) as client:
        ids = [(await upload(client, f"text {n}".encode())).json()["id"] for n in range(4)]
        await until(client, ids[0], "parsing")
        assert {(await until(client, id, "queued"))["status"] for id in ids[1:]} == {"queued"}
    reader.gate.set()
    async with open_client(read=reader) as client:
        assert {(await until(client, id))["status"] for id in ids} == {"ready"}


@pytest.mark.anyio
async def test_a_password_does_not_survive_the_server(open_client, upload, until, reader):
    reader.gate.clear()
    async with open_client(read=reader) as client:
        document_id = (await upload(client, PAGES, password="sesame")).json()["id"]
        await until(client, document_id, "parsing")
    reader.gate.set()
    async with open_client(read=reader) as client:
        await until(client, document_id)
    assert reader.passwords == ["sesame", None]


@pytest.mark.anyio
async def test_a_lost_engine_is_waited_for(client, upload, until, made, engine):
    engine.lose()
    document_id = (await upload(client, PAGES)).json()["id"]
    await until(client, document_id, "prefilling")
    await asyncio.sleep(0.5)
    assert (await client.get(f"/v1/documents/{document_id}")).json()["status"] == "prefilling"
    engine.come_back()
    assert (await until(client, document_id))["status"] == "ready"


@pytest.mark.anyio
async def test_an_engine_lost_in_the_middle_is_asked_again(open_client, upload, until, reader, eventually):
    engine = FakeEngine(max_context=20_000, chunk_delay_s=0.3)
    async with open_client(read=reader, engine=engine) as client:
        document_id = (await upload(client, PAGES)).json()["id"]
        await eventually(lambda: engine.built)
        engine.lose()
        engine.come_back()
        assert (await until(client, document_id))["status"] == "ready"
    assert len(engine.built) == 2


@pytest.mark.anyio
async def test_a_document_that_keeps_killing_the_engine_fails(client, made, engine, files_left, monkeypatch):
    monkeypatch.setattr(builds, "FIRST_PAUSE_S", 0.0)
    for _ in range(builds.MAX_LOSSES):
        engine.fail_next("build", LOST)
    body = await made(client, PAGES)
    assert (body["status"], body["error"]["code"]) == ("failed", "engine_lost")
    assert body["snapshot"]["state"] == "absent"
    assert await files_left() == []


@pytest.mark.anyio
async def test_a_busy_engine_is_asked_again(client, made, engine):
    engine.fail_next("build", Failed("busy", "another process builds it", retryable=True))
    assert (await made(client, PAGES))["status"] == "ready"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("code", "shown"),
    [("storage", "storage_full"), ("too_long", "context_length_exceeded"), ("internal", "internal")],
)
async def test_what_the_engine_refuses_is_told(client, made, engine, files_left, code, shown):
    engine.fail_next("build", Failed(code, "the budget is 10 bytes"))
    body = await made(client, PAGES)
    assert (body["status"], body["error"]["code"]) == ("failed", shown)
    assert await files_left() == []
    assert (await client.get(f"/v1/documents/{body['id']}/pages/1")).status_code == 404


@pytest.mark.anyio
async def test_a_fault_of_ours_ends_the_document_without_its_text(open_client, made, capsys):
    async def read(path, *, password, on_progress):
        raise RuntimeError("inside")

    async with open_client(read=read) as client:
        body = await made(client, PAGES)
    assert (body["status"], body["error"]["code"]) == ("failed", "internal_error")
    assert "inside" not in body["error"]["message"]


@pytest.mark.anyio
async def test_a_full_disk_delays_the_cleaning_and_does_not_prevent_it(open_client, made, reader, files_left):
    class Full(Store):
        n_calls = 0

        def delete(self, owner_id, kind, id):
            self.n_calls += 1
            if self.n_calls == 1:
                raise StorageFull("no room")
            return {"disk": (0, 0)}

    store = Full()
    async with open_client(read=reader, store=store) as client:
        assert (await made(client, b"x" * 30_000, retention="full"))["status"] == "failed"
        assert await files_left() == []
    assert store.n_calls == 2


@pytest.mark.anyio
async def test_a_document_that_waits_its_turn_can_be_cancelled(open_client, upload, until, reader, files_left):
    reader.gate.clear()
    async with open_client(read=reader) as client:
        first = (await upload(client, b"text 1")).json()["id"]
        await until(client, first, "parsing")
        waiting = (await upload(client, b"text 2")).json()["id"]
        assert (await client.post(f"/v1/documents/{waiting}/cancel")).json()["status"] == "cancelled"
        assert await files_left(1) == [first]
        reader.gate.set()
        assert (await until(client, first))["status"] == "ready"
        assert (await until(client, waiting))["status"] == "cancelled"
    assert reader.passwords == [None]


@pytest.mark.anyio
async def test_start_up_removes_what_a_crash_left(open_client, made, reader, store, settings, files_left):
    async with open_client(read=reader) as client:
        kept = await made(client, PAGES)
        failed = await made(client, b"x" * 30_000, retention="full")
        assert await files_left(1) == [kept["id"]]
    assert failed["status"] == "failed"
    for name in ("doc_1.part", "doc_2", failed["id"]):
        (settings.files_dir / name).write_bytes(b"left over")
    async with open_client(read=reader, store=store) as client:
        assert (await client.get(f"/v1/documents/{kept['id']}")).json()["status"] == "ready"
    assert [path.name for path in settings.files_dir.iterdir()] == [kept["id"]]
    assert store.deleted == [("local", "document", failed["id"])]


@pytest.mark.anyio
async def test_a_deletion_cut_short_is_finished_at_the_next_start(open_client, made, reader, store, settings):
    class Broken(Store):
        def delete(self, owner_id, kind, id):
            raise OSError("the disk is gone")

        def turns(self):
            raise OSError("the disk is gone")

    async with open_client(read=reader, store=Broken()) as client:
        document_id = (await made(client, PAGES))["id"]
        assert (await client.delete(f"/v1/documents/{document_id}")).status_code == 500
        assert (await client.get(f"/v1/documents/{document_id}")).status_code == 404
        assert (settings.files_dir / document_id).exists()
    async with open_client(read=reader, store=store) as client:
        assert store.deleted == [("local", "document", document_id)]
        assert (await client.delete(f"/v1/documents/{document_id}")).status_code == 404
    assert list(settings.files_dir.iterdir()) == []


@pytest.mark.anyio
async def test_a_full_disk_at_start_delays_a_deletion_and_not_the_start(
    open_client, made, reader, store, settings, eventually
):
    class Full(Store):
        full = True

        def delete(self, owner_id, kind, id):
            if self.full:
                raise StorageFull("no room")
            return store.delete(owner_id, kind, id)

        def turns(self):
            return []

    full, soon = Full(), {"sweep_interval_s": 0.02}
    async with open_client(read=reader, store=full) as client:
        document_id = (await made(client, PAGES))["id"]
        assert (await client.delete(f"/v1/documents/{document_id}")).status_code == 507
    async with open_client(soon, read=reader, store=full) as client:
        assert (await client.get(f"/v1/documents/{document_id}")).status_code == 404
        assert store.deleted == []
        full.full = False
        await eventually(lambda: store.deleted == [("local", "document", document_id)])
        await eventually(lambda: list(settings.files_dir.iterdir()) == [])


@pytest.mark.anyio
async def test_progress_is_known_after_a_restart(open_client, upload, until, reader, eventually):
    engine = FakeEngine(max_context=20_000, chunk_delay_s=0.4)
    async with open_client(read=reader, engine=engine) as client:
        document_id = (await upload(client, PAGES)).json()["id"]
        board = client.services.documents._board
        await eventually(lambda: (board.latest(document_id) or Progress("queued")).done >= 512)
        await client.services.jobs.store_progress()
    engine.lose()
    async with open_client(read=reader, engine=engine) as client:
        body = (await client.get(f"/v1/documents/{document_id}")).json()
        assert body["progress"]["done"] >= 512
        assert body["progress"]["unit"] == "tokens"
        engine.come_back()
        assert (await until(client, document_id))["status"] == "ready"
