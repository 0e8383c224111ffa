"""A PostgreSQL that is killed in the middle of the work: nothing is lost, and who asks is told to try again."""

import asyncio
import time

import pytest

from service.db.migrations import upgrade
from service.engine.fake import FakeEngine

TEXT = b"The fee is 1,275 pounds. " * 200


@pytest.fixture
async def over_postgres(anyio_backend, postgres, open_client):
    """Opens the API over an empty PostgreSQL."""
    url = postgres.new_database()
    await upgrade(url)
    return lambda **parts: open_client({"database_url": url}, **parts)


async def answered(client, path):
    """The response once the database is there for it."""
    async with asyncio.timeout(60):
        while (response := await client.get(path)).status_code == 503:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.05)
    return response


@pytest.mark.anyio
async def test_requests_are_told_to_try_again_and_the_server_recovers_by_itself(over_postgres, postgres, made):
    async with over_postgres() as client:
        document_id = (await made(client))["id"]
        await asyncio.to_thread(postgres.kill)
        for path in (f"/v1/documents/{document_id}", "/v1/documents", "/v1/sessions", "/health/ready"):
            response = await client.get(path)
            assert response.status_code == 503, path
            assert int(response.headers["Retry-After"]) >= 1
        problem = (await client.get("/v1/documents")).json()
        assert problem["type"] == "urn:preread:problem:database_unavailable"
        assert (await client.get("/health/live")).status_code == 200
        await asyncio.to_thread(postgres.start)
        assert (await answered(client, f"/v1/documents/{document_id}")).json()["status"] == "ready"


@pytest.mark.anyio
async def test_the_end_does_not_wait_for_a_database_that_stands_still(over_postgres, postgres, made):
    async with over_postgres() as client:
        await made(client)
        await asyncio.to_thread(postgres.freeze)
        began = time.monotonic()
    took = time.monotonic() - began
    postgres.thaw()
    assert took < 15, "each connection would be waited for 20 seconds"


@pytest.mark.anyio
async def test_a_refused_upload_leaves_nothing(over_postgres, postgres, settings, upload, made):
    async with over_postgres() as client:
        await asyncio.to_thread(postgres.kill)
        assert (await upload(client, TEXT)).status_code == 503
        assert list(settings.files_dir.iterdir()) == []
        await asyncio.to_thread(postgres.start)
        await answered(client, "/v1/documents")
        assert (await made(client, TEXT))["status"] == "ready"


@pytest.mark.anyio
async def test_a_document_that_is_being_read_is_finished(over_postgres, postgres, upload, until, reader):
    reader.gate.clear()
    engine = FakeEngine(max_context=20_000)
    async with over_postgres(read=reader, engine=engine) as client:
        document_id = (await upload(client, TEXT, password="sesame")).json()["id"]
        await until(client, document_id, "parsing")
        await asyncio.to_thread(postgres.kill)
        reader.gate.set()
        await asyncio.sleep(0.3)
        await asyncio.to_thread(postgres.start)
        await answered(client, "/v1/documents")
        assert (await until(client, document_id))["status"] == "ready"
    assert len(engine.built) == 1
    assert set(reader.passwords) == {"sesame"}, "a second try needs the password too"


@pytest.mark.anyio
async def test_an_answer_that_is_being_given_reaches_its_reader_and_is_kept(over_postgres, postgres, made):
    engine = FakeEngine([f"word{n} " for n in range(20)], max_context=20_000, token_delay_s=0.15)
    async with over_postgres(engine=engine) as client:
        document_id = (await made(client, TEXT))["id"]
        session_id = (await client.post("/v1/sessions", json={"document_ids": [document_id]})).json()["id"]
        asked = asyncio.create_task(
            client.post(f"/v1/sessions/{session_id}/questions", json={"question": "How much?"}, timeout=60)
        )
        async with asyncio.timeout(60):
            while not client.services.conversations.answers.running:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        await asyncio.to_thread(postgres.kill)
        while (await engine.stats()).running:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not asked.done()
        await asyncio.to_thread(postgres.start)
        answer = (await asked).json()
        assert answer["answer"] == "".join(f"word{n} " for n in range(20))
        (turn,) = (await answered(client, f"/v1/sessions/{session_id}")).json()["turns"]
        assert (turn["answer"], turn["status"]) == (answer, "done")


@pytest.mark.anyio
async def test_a_deletion_that_was_cut_is_finished_when_the_database_is_back(over_postgres, postgres, made, store):
    async with over_postgres(store=store) as client:
        document_id = (await made(client, TEXT))["id"]
        deletion = client.services.deletion
        release = client.services.engine.release

        async def release_and_lose(document):
            released = await release(document)
            await asyncio.to_thread(postgres.kill)
            return released

        client.services.engine.release = release_and_lose
        assert (await client.delete(f"/v1/documents/{document_id}")).status_code == 503
        client.services.engine.release = release
        await asyncio.to_thread(postgres.start)
        assert (await answered(client, f"/v1/documents/{document_id}")).status_code == 404
        await deletion.finish_far()
        async with client.services.db.reading() as uow:
            assert await uow.deletions.all() == []
