"""Rebuilding a lost snapshot, and following a model whose tokenizer changed."""

import asyncio
from dataclasses import replace

import pytest

from service.core.prompts import fake_prompts
from service.engine.fake import FakeEngine
from service.engine.messages import Failed
from service.errors import Conflict, NotFound, StorageFull, TooLong

PAGES = b"The keeper is Marta Kovalenko. \fThe fee is 200 pounds. "


@pytest.fixture
async def client(anyio_backend, open_client, reader):
    async with open_client(read=reader) as client:
        yield client


def snapshots(client):
    return client.services.snapshots


async def state_of(client, document_id):
    return (await client.get(f"/v1/documents/{document_id}")).json()["snapshot"]["state"]


@pytest.mark.alone
@pytest.mark.anyio
async def test_many_who_miss_it_rebuild_it_once(client, made, engine):
    body = await made(client, PAGES)
    engine.snapshots.clear()
    engine.chunk_delay_s = 1.0
    tasks = [asyncio.create_task(snapshots(client).rebuild(body["id"])) for _ in range(5)]
    while await state_of(client, body["id"]) != "rebuilding":  # noqa: ASYNC110 - what is asked is the API
        await asyncio.sleep(0.01)
    tasks[0].cancel()
    await asyncio.gather(*tasks[1:])
    assert await state_of(client, body["id"]) == "ready"
    assert len(engine.built) == 2
    assert engine.built[0].token_ids == engine.built[1].token_ids


@pytest.mark.anyio
async def test_a_rebuild_that_fails_can_be_tried_again(client, made, engine):
    body = await made(client, PAGES)
    engine.snapshots.clear()
    engine.fail_next("build", Failed("storage", "full"))
    with pytest.raises(StorageFull):
        await snapshots(client).rebuild(body["id"])
    assert await state_of(client, body["id"]) == "absent"
    await snapshots(client).rebuild(body["id"])
    assert await state_of(client, body["id"]) == "ready"


@pytest.mark.anyio
async def test_only_ready_documents_are_rebuilt(client, upload, until, reader):
    with pytest.raises(NotFound):
        await snapshots(client).rebuild("doc_nothing")
    reader.gate.clear()
    document_id = (await upload(client, PAGES)).json()["id"]
    with pytest.raises(Conflict):
        await snapshots(client).rebuild(document_id)
    reader.gate.set()
    await until(client, document_id)


@pytest.mark.anyio
async def test_a_deletion_ends_a_rebuild(client, made, engine):
    body = await made(client, PAGES)
    engine.snapshots.clear()
    engine.chunk_delay_s = 100
    rebuild = asyncio.create_task(snapshots(client).rebuild(body["id"]))
    await asyncio.sleep(0.1)
    assert (await client.delete(f"/v1/documents/{body['id']}")).status_code == 200
    await asyncio.wait({rebuild}, timeout=60)
    assert rebuild.done()
    assert engine.snapshots == {}


@pytest.mark.anyio
async def test_another_prompt_reads_the_stored_text_again(open_client, made, reader, engine):
    async with open_client(read=reader) as client:
        body = await made(client, PAGES)
        service = client.services
        row = (await service.documents.get("local", body["id"])).row
        assert await service.snapshots.current(row) is row
    prompts = fake_prompts()
    shorter = replace(prompts, digest="other")
    shorter.template.document_prefix_ids = shorter.template.document_prefix_ids[10:]
    async with open_client(read=reader, prompts=shorter) as client:
        service = client.services
        current = await service.snapshots.current(row)
        assert (current.token_count, current.template_digest) == (row.token_count - 10, "other")
        assert current.token_digest != row.token_digest
        page = (await client.get(f"/v1/documents/{body['id']}/pages/2")).json()
        assert page["token_end"] - page["token_start"] == len("The fee is 200 pounds. \n\n")
        await service.snapshots.rebuild(body["id"])
    assert len(engine.built[1].token_ids) == row.token_count - 10


@pytest.mark.anyio
async def test_a_smaller_context_is_said(open_client, made, reader):
    async with open_client(read=reader) as client:
        body = await made(client, PAGES)
    async with open_client(read=reader, engine=FakeEngine(max_context=100)) as client:
        with pytest.raises(TooLong, match="100"):
            await snapshots(client).rebuild(body["id"])


@pytest.mark.anyio
async def test_a_restart_in_the_middle_of_a_rebuild_leaves_it_absent(open_client, made, reader, engine):
    async with open_client(read=reader) as client:
        body = await made(client, PAGES)
        engine.chunk_delay_s = 100
        engine.snapshots.clear()
        rebuild = asyncio.create_task(snapshots(client).rebuild(body["id"]))
        await asyncio.sleep(0.1)
    await asyncio.wait({rebuild}, timeout=60)
    async with open_client(read=reader) as client:
        assert await state_of(client, body["id"]) == "absent"
