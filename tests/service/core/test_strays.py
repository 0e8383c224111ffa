"""The database goes away between a commit and its reply: what was kept is worked on, what was not leaves nothing."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from service.core.clock import FakeClock
from service.core.strays import Strays
from service.engine.fake import FakeEngine
from service.errors import CommitUnknown, Unavailable

TEXT = b"The keeper is Marta Kovalenko. " * 100
SHARED = {"fleet_url": "redis://is-not-asked", "lease_s": 0.4}


class Forgetful:
    """A database whose replies to commits are lost, while `loses`; `keeps`: the commits were made."""

    def __init__(self, database, keeps):
        self._database = database
        self._keeps = keeps
        self.loses = True

    def __getattr__(self, name):
        return getattr(self._database, name)

    @asynccontextmanager
    async def writing(self, **options):
        async with self._database.writing(**options) as uow:
            yield uow
            if self.loses and not self._keeps:
                raise CommitUnknown("try again")
        if self.loses:
            raise CommitUnknown("try again")


@pytest.fixture
def engine():
    return FakeEngine(max_context=20_000)


@pytest.fixture
async def two(anyio_backend, open_client, reader):
    async with open_client(SHARED, read=reader) as one, open_client(SHARED, read=reader) as other:
        yield one, other


def test_what_is_only_just_begun_is_left_alone():
    clock = FakeClock()
    strays = Strays(clock, 10.0)
    assert strays.due({"a", "b"}) == []
    clock.advance(9.0)
    assert strays.due({"a"}) == []
    clock.advance(1.0)
    assert strays.due({"a", "b"}) == ["a"]
    assert strays.due({"b"}) == []


@pytest.mark.anyio
@pytest.mark.parametrize("keeps", [True, False])
async def test_an_upload_whose_commit_was_not_answered(two, upload, until, keeps, engine, files_left):
    one, other = two
    uploads = one.services.uploads
    uploads._db = database = Forgetful(uploads._db, keeps)
    assert (await upload(one, TEXT)).status_code == 503
    database.loses = False
    if not keeps:
        assert await files_left(0) == []
    again = await upload(other, TEXT)
    assert again.status_code == (200 if keeps else 202)
    assert (await until(other, again.json()["id"]))["status"] == "ready"
    assert len(engine.built) == 1


@pytest.mark.anyio
async def test_a_document_that_was_taken_up_without_knowing_is_read(two, made, until):
    one, other = two
    document_id = (await made(other, TEXT))["id"]
    async with other.services.db.writing() as uow:
        await uow.documents.change(document_id, status="queued", lease_owner=one.services.leases.owner)
    assert (await until(other, document_id))["status"] == "ready"


@pytest.mark.anyio
async def test_a_question_whose_commit_was_not_answered_keeps_nobody_waiting(two, made):
    one, other = two
    document_id = (await made(one, TEXT))["id"]
    session_id = (await one.post("/v1/sessions", json={"document_ids": [document_id]})).json()["id"]
    log = one.services.conversations.turns
    log._database = database = Forgetful(log._database, True)
    path, question = f"/v1/sessions/{session_id}/questions", {"question": "Who?"}
    assert (await one.post(path, json=question)).status_code == 503
    database.loses = False
    assert (await other.post(path, json=question)).json()["error"]["code"] == "session_busy"
    async with asyncio.timeout(60):
        while (response := await other.post(path, json=question)).status_code == 409:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert response.status_code == 200


@pytest.mark.anyio
async def test_a_rebuild_whose_claim_was_not_answered_is_claimed_again(two, made, engine):
    one = two[0]
    document_id = (await made(one, TEXT))["id"]
    engine.snapshots.clear()
    snapshots = one.services.snapshots
    snapshots._db = database = Forgetful(snapshots._db, True)
    with pytest.raises(Unavailable):
        await snapshots.rebuild(document_id)
    database.loses = False
    async with asyncio.timeout(60):
        await snapshots.rebuild(document_id)
    assert len(engine.built) == 2
