"""The client for asyncio has the methods of the other one, and does the same."""

import asyncio
import inspect

import pytest

from service.client import AsyncClient, Citation, Client, ConnectionFailed, Done, NotFound, Token
from tests.service.client.conftest import TEXT

pytestmark = pytest.mark.anyio


@pytest.fixture
async def aclient(live, anyio_backend):
    async with AsyncClient(live.url, timeout=60) as client:
        yield client


async def test_the_whole_journey(aclient, live, tmp_path):
    live.engine.reply = ("The safety officer ", "is Bartholomew Kemp.")
    (tmp_path / "other.txt").write_bytes(TEXT * 3)
    sent = []
    made = await aclient.documents.upload(tmp_path / "other.txt", on_progress=lambda *n: sent.append(n), ttl_s=5000)
    assert (made.created, sent[-1]) == (True, (len(TEXT) * 3, len(TEXT) * 3))
    told = []
    ready = await aclient.documents.wait(made.id, on_progress=told.append, timeout_s=30)
    assert (ready.status, told[-1]) == ("ready", ready)
    assert await aclient.documents.file(made.id) == TEXT * 3
    assert (await aclient.documents.save_file(made.id, tmp_path / "copy")).read_bytes() == TEXT * 3
    assert [page.number async for page in aclient.documents.pages(made.id)] == [1, 2, 3, 4]
    assert (await aclient.documents.update(made.id, ttl_s=None)).expires_at is None
    assert (await aclient.documents.pin(made.id)).pinned
    assert not (await aclient.documents.unpin(made.id)).pinned
    assert await anext(aclient.documents.list(page_size=1)) == await aclient.documents.get(made.id)
    session = await aclient.sessions.create(made.id, title="First")
    async with aclient.stream(session.id, "Who?") as events:
        seen = [event async for event in events]
    assert [type(each) for each in seen] == [Token, Token, Citation, Done]
    assert (await aclient.ask(session.id, "Who?")).text == events.text
    assert [e async for e in aclient.follow(session.id, events.answer_id, "19")] == seen[1:]
    fork = await aclient.sessions.fork(session.id)
    assert len(fork.turns) == len((await aclient.sessions.get(session.id)).turns) == 2
    assert [each.id async for each in aclient.sessions.list()][:2] == [fork.id, session.id]
    await aclient.sessions.delete(fork.id)
    share = await aclient.documents.shares.create(made.id, "link", access="read")
    assert [each.id for each in await aclient.documents.shares.list(made.id)] == [share.id]
    await aclient.documents.shares.revoke(made.id, share.id)
    assert (await aclient.documents.delete(made.id)).removed
    with pytest.raises(NotFound):
        await aclient.documents.get(made.id)


async def test_questions_at_once(aclient, live, document):
    async def ask():
        session = await aclient.sessions.create(document.id)
        return (await aclient.ask(session.id, "Who?")).text

    answers = await asyncio.gather(*(ask() for _ in range(6)))
    assert len(set(answers)) == 1


async def test_a_task_that_is_cancelled_leaves_the_stream(aclient, session, counting):
    events = aclient.stream(session.id, "Count")

    async def read():
        async with events:
            async for _ in events:
                pass

    task = asyncio.create_task(read())
    while not events.text:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await aclient.follow(session.id, events.answer_id).answer()).text == counting


async def test_a_server_that_is_not_there():
    async with AsyncClient("http://127.0.0.1:9", retries=1) as nobody:
        with pytest.raises(ConnectionFailed, match="running"):
            await nobody.is_ready()


def public(kind):
    return {name: value for name, value in vars(kind).items() if not name.startswith("_") and callable(value)}


def test_both_clients_have_the_same_methods_with_the_same_parameters():
    with Client("http://localhost") as client:
        other = AsyncClient("http://localhost")
        pairs = [(client, other), (client.documents, other.documents), (client.sessions, other.sessions)]
        pairs += [(client.documents.shares, other.documents.shares), (client.stream("s", "?"), other.stream("s", "?"))]
    for one, two in pairs:
        mine, theirs = public(type(one)), public(type(two))
        assert mine.keys() == theirs.keys()
        for name in mine:
            kinds = [inspect.signature(each).parameters for each in (mine[name], theirs[name])]
            assert list(kinds[0]) == list(kinds[1]), name
            assert [p.default for p in kinds[0].values()] == [p.default for p in kinds[1].values()], name
