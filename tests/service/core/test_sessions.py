"""Sessions: made, listed, forked, deleted."""

import pytest

from service.engine.messages import Failed
from service.errors import Conflict, Invalid, NotFound

pytestmark = pytest.mark.anyio


async def test_sessions_need_ready_documents(world) -> None:
    with pytest.raises(NotFound):
        await world.sessions.create(world.owner, ["doc_no"])
    with pytest.raises(NotFound):
        await world.sessions.create("someone", ["doc_1"])
    with pytest.raises(Invalid, match="named twice"):
        await world.sessions.create(world.owner, ["doc_1", "doc_1"])
    with pytest.raises(Invalid):
        await world.sessions.create(world.owner, [])
    with pytest.raises(Conflict, match="parsing"):
        await world.sessions.create(world.owner, ["doc_2"])


async def test_a_refusal_names_the_document_and_says_what_to_do(world) -> None:
    with pytest.raises(NotFound, match="doc_no"):
        await world.sessions.create(world.owner, ["doc_1", "doc_no"])
    with pytest.raises(Conflict, match="doc_2 is parsing, not ready: wait"):
        await world.sessions.create(world.owner, ["doc_1", "doc_2"])
    async with world.database.writing() as uow:
        await uow.documents.change("doc_2", status="failed")
    with pytest.raises(Conflict, match="doc_2 is failed, not ready: it cannot be asked about"):
        await world.sessions.create(world.owner, ["doc_1", "doc_2"])


async def test_sessions_are_listed_newest_first_in_pages(world) -> None:
    ids = [await world.session() for _ in range(5)]
    seen: list[str] = []
    after = None
    while True:
        page = await world.sessions.page(world.owner, limit=2, after=after)
        seen += [row.id for row in page.sessions]
        if not page.has_more:
            break
        after = seen[-1]
    assert seen == ids[::-1]
    assert (await world.sessions.page("someone")).sessions == []


async def test_fork_shares_kv_and_goes_its_own_way(world) -> None:
    session_id = await world.session()
    first = await world.answer(session_id, "One?")
    await world.answer(session_id, "Two?")
    fork, turns = await world.sessions.fork(world.owner, session_id, after_turn=first["id"], title="Side")
    assert (fork.forked_from, fork.title, len(turns)) == (session_id, "Side", 1)
    await world.answer(fork.id, "Other?")
    assert [turn.kv_id for turn in world.engine.answered[-1].turns] == [first["id"]]
    assert len((await world.sessions.get(world.owner, session_id))[1]) == 2
    _, turns = await world.sessions.fork(world.owner, session_id)
    assert [turn.question for turn in turns] == ["One?", "Two?"]
    assert len({turn.id for turn in turns} | {first["id"]}) == 3


async def test_fork_refusals(world) -> None:
    session_id = await world.session()
    world.engine.fail_next("answer", Failed("internal", "x"))
    stream = await world.ask(session_id)
    await stream.wait_closed()
    with pytest.raises(NotFound):
        await world.sessions.fork(world.owner, session_id, after_turn="ans_no")
    with pytest.raises(Conflict):
        await world.sessions.fork(world.owner, session_id, after_turn=stream.answer_id)
    with pytest.raises(NotFound):
        await world.sessions.fork(world.owner, "ses_no")


async def test_deleting_a_session_ends_its_answer_and_spares_shared_turns(world) -> None:
    session_id = await world.session()
    first = await world.answer(session_id, "One?")
    fork, _ = await world.sessions.fork(world.owner, session_id)
    second = await world.answer(session_id, "Two?")
    world.engine.reply = ["x"] * 500
    world.engine.token_delay_s = 0.005
    running = await world.ask(session_id, "Three?")
    await world.sessions.delete(world.owner, session_id)
    assert running.closed
    assert first["id"] not in world.files.removed
    assert second["id"] in world.files.removed
    with pytest.raises(NotFound):
        await world.sessions.get(world.owner, session_id)
    await world.sessions.delete(world.owner, fork.id)
    assert first["id"] in world.files.removed


async def test_document_removed_while_answering(world) -> None:
    world.engine.reply = ["x"] * 500
    world.engine.token_delay_s = 0.005
    session_id = await world.session()
    stream = await world.ask(session_id)
    async with world.database.writing() as uow:
        await uow.documents.remove("doc_1")
    await world.conversations.document_removed("doc_1", [session_id])
    assert stream.last_event is not None
    assert isinstance(stream.last_event.data, NotFound)
    with pytest.raises(NotFound):
        await world.ask(session_id)


async def test_orphaned_turns_are_swept(world) -> None:
    kept = await world.answer(await world.session())
    world.files.stored = [kept["id"], "ans_orphan"]
    await world.conversations.recover()
    assert world.files.removed == ["ans_orphan"]


async def test_titles_of_sessions_are_as_those_of_documents(world) -> None:
    with pytest.raises(Invalid, match="printable"):
        await world.sessions.create(world.owner, ["doc_1"], "a\x00b")
    with pytest.raises(Invalid, match="printable"):
        await world.sessions.fork(world.owner, await world.session(), title="\u202egnirts")
