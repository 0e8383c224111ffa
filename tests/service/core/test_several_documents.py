"""Sessions over several documents: what the engine is asked, what answers say, and what ends with a document."""

import pytest

from service.db.models import PageRow
from service.engine.fake import digest_of
from service.engine.messages import DocumentRef, Failed, Look, PieceLooks, SpanRef
from service.errors import Invalid, NotFound, TooLong, Unavailable
from tests.service.core.conftest import DOCUMENT_IDS, OWNER, document_row

pytestmark = pytest.mark.anyio
THIRD = "The auditor is Clara Vint, of the firm Vint and Sons. She came in May."


@pytest.fixture
async def world(world):
    """With a second ready document, of two pages."""
    for name in ("doc_3", "doc_4"):
        row = document_row(name)
        row.page_count = 2
        async with world.database.writing() as uow:
            await uow.documents.add(row)
            await uow.pages.replace(
                name,
                [
                    PageRow(document_id=name, number=1, text="Nothing of note.", token_start=20, token_end=300),
                    PageRow(document_id=name, number=2, text=THIRD, token_start=300, token_end=590),
                ],
            )
        world.engine.snapshots[DocumentRef(OWNER, name)] = (digest_of(DOCUMENT_IDS), len(DOCUMENT_IDS), None)
    return world


async def session(world, *ids: str) -> str:
    return (await world.sessions.create(OWNER, list(ids or ("doc_1", "doc_3")))).id


async def test_the_session_keeps_its_documents_in_order(world) -> None:
    row = await world.sessions.create(OWNER, ["doc_3", "doc_1"])
    assert row.document_ids == ["doc_3", "doc_1"]
    stored, _ = await world.sessions.get(OWNER, row.id)
    assert stored.document_ids == ["doc_3", "doc_1"]
    fork, _ = await world.sessions.fork(OWNER, row.id)
    assert fork.document_ids == ["doc_3", "doc_1"]
    assert [each.document_ids for each in (await world.sessions.page(OWNER)).sessions] == [["doc_3", "doc_1"]] * 2


async def test_what_the_engine_is_asked_and_what_the_answer_counts(world) -> None:
    result = await world.answer(await session(world))
    request = world.engine.answered[-1]
    assert [part.document.document_id for part in request.parts] == ["doc_1", "doc_3"]
    assert [part.resident for part in request.parts] == [[(0, 52), (472, 600)], [(20, 52), (472, 600)]]
    assert (request.fetch_tokens, request.retention, request.token_digest) == (256, None, "")
    assert result["usage"]["document_tokens"] == result["usage"]["reused_tokens"] == 2 * len(DOCUMENT_IDS)


async def test_citations_and_provenance_name_the_document(world) -> None:
    world.engine.reply = ["The auditor is ", "Clara Vint, of the firm Vint and Sons."]
    world.engine.fetched = [SpanRef(300, 40, 1)]
    result = await world.answer(await session(world), "Who is the auditor?")
    assert [(c["document_id"], c["page"]) for c in result["citations"]] == [("doc_3", 2)]
    assert {"document_id": "doc_3", "first_page": 2, "last_page": 2, "mode": "fetched"} in result["provenance"]
    assert all(part["document_id"] == "doc_3" for part in result["provenance"] if part["mode"] == "fetched")
    assert result["notice"] is None
    world.engine.reply = ["The safety officer is Bartholomew Kemp."]
    result = await world.answer(await session(world, "doc_3", "doc_1"), "Who?")
    assert [(c["document_id"], c["page"]) for c in result["citations"]] == [("doc_1", 1)]


async def test_attention_is_told_by_document_and_stays_after_a_restart(world) -> None:
    world.engine.reply = ["She audits ", "the books."]
    world.engine.looks = [PieceLooks(21, 0.5, [Look(300, 290, 0.4, 1), Look(0, 16, 0.1, 0)])]
    session_id = await session(world)
    (citation,) = (await world.answer(session_id, "Who audits?"))["citations"]
    assert (citation["document_id"], citation["page"], citation["attention"]) == ("doc_3", 2, 1.0)
    assert citation["quote"] in THIRD
    assert citation["score"] < 0.5
    world.conversations = world.build()
    _, (turn,) = await world.sessions.get(OWNER, session_id)
    assert turn.citations == [citation]


async def test_a_follow_up_hands_over_the_spans_with_their_documents(world) -> None:
    world.engine.fetched = [SpanRef(100, 40), SpanRef(300, 40, 1)]
    session_id = await session(world)
    await world.answer(session_id, "One?")
    await world.answer(session_id, "Two?")
    assert world.engine.answered[-1].turns[0].spans == world.engine.fetched


async def test_each_missing_snapshot_is_rebuilt_once(world) -> None:
    for name in ("doc_1", "doc_3"):
        del world.engine.snapshots[DocumentRef(OWNER, name)]
    result = await world.answer(await session(world))
    assert world.snapshots.rebuilt == ["doc_1", "doc_3"]
    assert result["cache"]["miss_reason"] == "absent"
    assert result["usage"]["prefilled_tokens"] >= 2 * len(DOCUMENT_IDS)
    assert result["usage"]["reused_tokens"] == 0


async def test_a_miss_that_is_no_documents_own_is_tried_once_more(world) -> None:
    miss = Failed("snapshot_miss", "put together wrongly", miss_reason="canary")
    world.engine.fail_next("answer", miss)
    result = await world.answer(session_id := await session(world))
    assert (world.snapshots.rebuilt, result["cache"]["miss_reason"]) == ([], "canary")
    for _ in range(2):
        world.engine.fail_next("answer", miss)
    with pytest.raises(Unavailable):
        await world.answer(session_id)


async def test_a_session_ends_with_any_of_its_documents(world) -> None:
    first, second = await session(world), await session(world, "doc_1", "doc_4")
    await world.answer(first)
    async with world.database.writing() as uow:
        assert await uow.deletions.sessions_of("doc_3") == [first]
        assert len(await uow.deletions.turns_of("doc_3")) == 1
        await uow.documents.remove("doc_3")
    with pytest.raises(NotFound):
        await world.ask(first)
    assert [row.id for row in (await world.sessions.page(OWNER)).sessions] == [second]
    async with world.database.writing() as uow:
        await uow.documents.change("doc_4", expires_at=1.0)
    with pytest.raises(NotFound):
        await world.ask(second)
    assert (await world.sessions.page(OWNER)).sessions == []


async def test_what_is_refused(world) -> None:
    with pytest.raises(Invalid, match="5 documents were given; a session has from 1 to 4"):
        await session(world, *"abcde")
    with pytest.raises(NotFound):
        await session(world, "doc_1", "doc_no")
    async with world.database.writing() as uow:
        await uow.documents.change("doc_4", token_count=1900)
    with pytest.raises(TooLong, match="doc_4 takes 1,900"):
        await session(world, "doc_1", "doc_4")
