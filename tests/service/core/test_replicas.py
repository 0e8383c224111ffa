"""Two API processes in one event loop, over one database, one folder and one engine: they share the work."""

import asyncio

import pytest

from service.engine.fake import FakeEngine
from service.engine.messages import Failed
from service.errors import NotFound, StorageFull

TEXT = b"The keeper is Marta Kovalenko. " * 100
SHARED = {"fleet_url": "redis://is-not-asked", "lease_s": 0.4}


@pytest.fixture
def engine():
    return FakeEngine(max_context=20_000)


@pytest.fixture
async def two(anyio_backend, open_client, reader):
    async with open_client(SHARED, read=reader) as one, open_client(SHARED, read=reader) as other:
        yield one, other


@pytest.mark.anyio
async def test_the_same_bytes_at_the_same_moment_are_read_once(two, upload, until, engine):
    responses = await asyncio.gather(*(upload(client, TEXT) for client in two * 5))
    assert sorted(response.status_code for response in responses) == [200] * 9 + [202]
    (document_id,) = {response.json()["id"] for response in responses}
    for client in two:
        assert (await until(client, document_id))["status"] == "ready"
    assert len(engine.built) == 1


@pytest.mark.anyio
async def test_events_are_read_at_a_process_that_does_not_work_on_the_document(two, upload, reader):
    one, other = two
    reader.gate.clear()
    document_id = (await upload(one, TEXT)).json()["id"]
    reading = asyncio.create_task(other.get(f"/v1/documents/{document_id}/events", timeout=60))
    await asyncio.sleep(1.2)
    assert not reading.done()
    reader.gate.set()
    events = [line for line in (await reading).text.splitlines() if line.startswith("event: ")]
    assert events[-1] == "event: ready"
    assert "event: progress" in events


@pytest.mark.anyio
async def test_cancelled_at_the_other_it_ends_here_and_leaves_nothing(
    two, upload, until, eventually, engine, files_left
):
    one, other = two
    engine.chunk_delay_s = 0.2
    document_id = (await upload(one, TEXT)).json()["id"]
    await eventually(lambda: engine.built)
    assert (await other.post(f"/v1/documents/{document_id}/cancel")).json()["status"] == "cancelled"
    await eventually(lambda: not one.services.jobs.running)
    assert (await one.get(f"/v1/documents/{document_id}")).json()["status"] == "cancelled"
    assert engine.snapshots == {}
    assert await files_left() == []


@pytest.mark.anyio
async def test_a_deletion_at_the_other_ends_the_work_and_what_it_made(two, upload, eventually, engine, reader):
    one, other = two
    reader.gate.clear()
    document_id = (await upload(one, TEXT)).json()["id"]
    await eventually(lambda: reader.passwords)
    assert (await other.delete(f"/v1/documents/{document_id}")).status_code == 200
    reader.gate.set()
    await eventually(lambda: not one.services.jobs.running)
    assert engine.built == []
    assert (await one.get(f"/v1/documents/{document_id}")).status_code == 404


@pytest.mark.anyio
async def test_work_of_a_process_that_leaves_goes_on_at_the_other(open_client, upload, until, reader, engine):
    reader.gate.clear()
    async with open_client(SHARED, read=reader) as other:
        async with open_client(SHARED, read=reader) as one:
            ids = [(await upload(one, TEXT + bytes([n]) * 9)).json()["id"] for n in b"abc"]
        reader.gate.set()
        for document_id in ids:
            assert (await until(other, document_id))["status"] == "ready"
    assert len(engine.built) == 3


@pytest.mark.anyio
async def test_a_snapshot_that_both_miss_is_rebuilt_once(two, made, engine):
    one, other = two
    document_id = (await made(one, TEXT))["id"]
    engine.snapshots.clear()
    engine.chunk_delay_s = 0.1
    await asyncio.gather(*(client.services.snapshots.rebuild(document_id) for client in two * 3))
    assert len(engine.built) == 2
    engine.snapshots.clear()
    await other.services.snapshots.rebuild(document_id)
    assert len(engine.built) == 3


@pytest.mark.anyio
async def test_a_rebuild_that_fails_at_one_is_tried_by_the_other(two, made, engine):
    one = two[0]
    document_id = (await made(one, TEXT))["id"]
    engine.snapshots.clear()
    engine.fail_next("build", Failed("storage", "full"))
    results = await asyncio.gather(
        *(client.services.snapshots.rebuild(document_id) for client in two), return_exceptions=True
    )
    assert sorted(type(each) is StorageFull for each in results) == [False, True]


@pytest.mark.anyio
async def test_what_is_rebuilt_after_a_deletion_at_the_other_does_not_stay(two, made, engine, eventually):
    one, other = two
    document_id = (await made(one, TEXT))["id"]
    engine.snapshots.clear()
    engine.fail_next("build", Failed("busy", "one writer at a time"))
    rebuilding = asyncio.create_task(one.services.snapshots.rebuild(document_id))
    await eventually(lambda: not engine._failures["build"])
    assert (await other.delete(f"/v1/documents/{document_id}")).status_code == 200
    with pytest.raises(NotFound):
        await rebuilding
    assert len(engine.built) == 2
    assert engine.snapshots == {}
    assert (await one.get(f"/v1/documents/{document_id}")).status_code == 404
