"""Quotas and rates of an owner, requests that are sent twice, instructions, and the audit log."""

import asyncio

import pytest
from sqlalchemy import update

from service.db.models import TurnRow
from service.engine.messages import Failed

pytestmark = pytest.mark.anyio
QUESTION = {"question": "Who is the keeper?"}


@pytest.fixture
async def session_of(upload, until):
    """Begins a session over a document, which is always the same."""

    async def make(client, **body):
        document_id = (await upload(client)).json()["id"]
        await until(client, document_id)
        response = await client.post("/v1/sessions", json={"document_ids": [document_id], **body})
        assert response.status_code == 201, response.text
        return response.json()["id"]

    return make


def refused(response, code):
    assert (response.status_code, response.json()["error"]["code"]) == (429, code), response.text
    assert int(response.headers["retry-after"]) >= 1
    return int(response.headers["retry-after"])


async def test_documents_and_bytes_of_each_owner(open_client, person, upload, made, files_left):
    async with open_client({"quota_documents": 2, "quota_bytes": 2000}) as client:
        ann, bob = await person(client.services), await person(client.services, "bob")
        client.headers = ann.headers
        first = await made(client, b"x" * 1500)
        refused(await upload(client, b"y" * 501), "quota_bytes")
        assert (await upload(client, b"x" * 1500)).status_code == 200, "one's own again is no second one"
        await made(client, b"y" * 500)
        refused(await upload(client, b"z"), "quota_documents")
        assert len(await files_left(2)) == 2
        client.headers = bob.headers
        await made(client, b"z")
        client.headers = ann.headers
        await client.delete(f"/v1/documents/{first['id']}")
        await made(client, b"z")


async def test_tokens_of_a_day_without_what_is_reused(open_client, person, session_of, upload, clock):
    async with open_client({"quota_tokens_per_day": 1200}, clock=clock) as client:
        client.headers = (await person(client.services)).headers
        session_id = await session_of(client)  # of 1,082 tokens, and some for each question
        path, answered = f"/v1/sessions/{session_id}/questions", 0
        while (response := await client.post(path, json=QUESTION)).status_code == 200:
            answered += 1
            assert answered < 10
        assert answered >= 1
        wait_s = refused(response, "quota_tokens_per_day")
        refused(await upload(client, b"another"), "quota_tokens_per_day")
        clock.advance(wait_s + 1)
        assert (await client.post(path, json=QUESTION)).status_code == 200


async def test_questions_at_a_time_also_through_links(open_client, person, session_of, engine, eventually):
    engine.token_delay_s = 0.4
    async with open_client({"quota_questions": 1}) as client:
        ann = await person(client.services)
        client.headers = ann.headers
        one, other = await session_of(client), await session_of(client)
        document_id = (await client.get("/v1/documents")).json()["data"][0]["id"]
        link = (await client.post(f"/v1/documents/{document_id}/shares", json={"with": "link"})).json()
        guest = {"Authorization": f"Bearer {link['token']}"}
        body = {"document_ids": [document_id]}
        theirs = (await client.post("/v1/sessions", json=body, headers=guest)).json()["id"]
        asking = asyncio.create_task(client.post(f"/v1/sessions/{one}/questions", json=QUESTION))
        await eventually(lambda: client.services.conversations.answers.running)
        refused(await client.post(f"/v1/sessions/{other}/questions", json=QUESTION), "quota_questions")
        asked = await client.post(f"/v1/sessions/{theirs}/questions", json=QUESTION, headers=guest)
        refused(asked, "quota_questions")
        assert "1" not in asked.json()["detail"], "a link is not told how much its maker asks"
        assert (await asking).status_code == 200
        assert (await client.post(f"/v1/sessions/{other}/questions", json=QUESTION)).status_code == 200


async def test_a_question_whose_end_was_not_stored_counts_for_nothing(open_client, session_of):
    async with open_client({"quota_questions": 1}) as client:
        session_id = await session_of(client)
        path = f"/v1/sessions/{session_id}/questions"
        assert (await client.post(path, json=QUESTION)).status_code == 200
        async with client.services.db.writing() as uow:
            await uow.session.execute(update(TurnRow).values(status="running", lease_owner="api_gone"))
        assert (await client.post(path, json=QUESTION)).status_code == 200


async def test_rate_of_requests(open_client, person):
    async with open_client({"rate_per_minute": 60, "rate_burst": 3}) as client:
        ann, bob = await person(client.services), await person(client.services, "bob")
        statuses = [(await client.get("/v1/documents", headers=ann.headers)).status_code for _ in range(3)]
        assert statuses == [200] * 3
        assert refused(await client.get("/v1/documents", headers=ann.headers), "rate_limited") == 1
        assert (await client.get("/v1/documents", headers=bob.headers)).status_code == 200
        assert (await client.get("/health/live")).status_code == 200


async def test_a_question_that_is_sent_again_is_answered_once(client, person, session_of, engine):
    ann, bob = await person(client.services), await person(client.services, "bob")
    client.headers = ann.headers
    session_id = await session_of(client)
    path, once = f"/v1/sessions/{session_id}/questions", {"Idempotency-Key": "try-1"}
    first = await client.post(path, json=QUESTION, headers=once)
    again = await client.post(path, json=QUESTION, headers=once)
    assert again.json() == first.json()
    assert again.headers["location"] == first.headers["location"]
    streamed = await client.post(path, json=QUESTION | {"stream": True}, headers=once)
    assert first.json()["id"] in streamed.text, "also as a stream"
    assert len(engine.answered) == 1
    other = await client.post(path, json={"question": "And why?"}, headers=once)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    for wrong in ("", "x" * 201):
        response = await client.post(path, json=QUESTION, headers={"Idempotency-Key": wrong})
        assert response.status_code == 422
    beside = await client.post(f"/v1/sessions/{await session_of(client)}/questions", json=QUESTION, headers=once)
    assert (beside.status_code, len(engine.answered)) == (200, 2), "and each session's own"
    client.headers = bob.headers
    theirs = await session_of(client)
    response = await client.post(f"/v1/sessions/{theirs}/questions", json=QUESTION, headers=once)
    assert response.json()["id"] != first.json()["id"], "keys are each owner's own"


async def test_a_question_sent_twice_at_once_is_answered_once(client, session_of, engine, eventually):
    engine.token_delay_s = 0.05
    session_id = await session_of(client)
    path, once = f"/v1/sessions/{session_id}/questions", {"Idempotency-Key": "try-1"}
    first = asyncio.create_task(client.post(path, json=QUESTION, headers=once))
    await eventually(lambda: client.services.conversations.answers.running)
    again = await client.post(path, json=QUESTION, headers=once)
    assert again.json() == (await first).json()
    assert len(engine.answered) == 1


async def test_one_that_failed_is_asked_again(client, session_of, engine):
    session_id = await session_of(client)
    path, once = f"/v1/sessions/{session_id}/questions", {"Idempotency-Key": "try-1"}
    engine.fail_next("answer", Failed("engine_lost", "it ended", retryable=True))
    assert (await client.post(path, json=QUESTION, headers=once)).status_code == 503
    assert (await client.post(path, json=QUESTION, headers=once)).status_code == 200
    assert (await client.post(path, json=QUESTION, headers=once)).status_code == 200
    turns = (await client.get(f"/v1/sessions/{session_id}")).json()["turns"]
    assert [turn["status"] for turn in turns] == ["failed", "done"]


async def test_an_upload_that_is_sent_again(client, upload, until):
    once = {"Idempotency-Key": "try-1"}
    post = {"files": {"file": ("a.txt", b"The first one.")}, "headers": once}
    first = await client.post("/v1/documents", **post)
    await until(client, first.json()["id"])
    await client.delete(f"/v1/documents/{first.json()['id']}")
    second = await client.post("/v1/documents", **post)
    assert second.status_code == 202, "what was removed meanwhile is taken in again"
    again = await client.post("/v1/documents", **post)
    assert (again.status_code, again.json()["id"]) == (200, second.json()["id"])
    other = await client.post("/v1/documents", files={"file": ("a.txt", b"Another.")}, headers=once)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


async def test_one_key_is_for_one_upload_also_when_two_come_at_once(client):
    def sent(data):
        once = {"Idempotency-Key": "try-1"}
        return client.post("/v1/documents", files={"file": ("a.txt", data)}, headers=once)

    both = await asyncio.gather(sent(b"The first one."), sent(b"Another."))
    assert sorted(response.status_code for response in both) == [202, 422]
    assert len((await client.get("/v1/documents")).json()["data"]) == 1


async def test_the_end_of_its_time_is_not_the_doing_of_whoever_looks(open_client, person, upload, until, clock):
    async with open_client(clock=clock) as client:
        client.headers = (await person(client.services)).headers
        ids = []
        for _ in range(2):
            ids.append((await upload(client, ttl_s="60")).json()["id"])
            await until(client, ids[-1])
            clock.advance(61)
        assert (await client.get(f"/v1/documents/{ids[-1]}")).status_code == 404
        async with client.services.db.reading() as uow:
            rows = await uow.records.audited(limit=9)
        assert [row.key_id for row in rows if row.action == "expire"] == [None, None]
        assert not [row for row in rows if row.action == "delete"]


async def test_instructions_come_after_the_document_and_cost_no_prefill_of_it(client, session_of, engine):
    plain, german = await session_of(client), await session_of(client, instructions=" Answer in German. ")
    first = (await client.post(f"/v1/sessions/{plain}/questions", json=QUESTION)).json()
    answer = (await client.post(f"/v1/sessions/{german}/questions", json=QUESTION)).json()
    assert len(engine.built) == 1
    assert answer["usage"]["reused_tokens"] == answer["usage"]["document_tokens"]
    asked = bytes(id for id in engine.answered[-1].prompt_ids if id < 256)
    assert b"Answer in German.\n\nWho is the keeper?" in asked, "one token per byte"
    assert answer["usage"]["prefilled_tokens"] == first["usage"]["prefilled_tokens"] + len("Answer in German.\n\n")
    detail = (await client.get(f"/v1/sessions/{german}")).json()
    assert (detail["instructions"], detail["turns"][0]["question"]) == ("Answer in German.", QUESTION["question"])
    fork = (await client.post(f"/v1/sessions/{german}/fork", json={"instructions": "Be brief."})).json()
    assert fork["instructions"] == "Be brief."
    body = {"document_ids": ["doc_x"], "instructions": "x" * 1001}
    assert (await client.post("/v1/sessions", json=body)).status_code == 422


async def test_the_audit_log_has_ids_and_no_text(client, person, session_of, settings):
    ann = await person(client.services)
    client.headers = ann.headers
    session_id = await session_of(client)
    answer_id = (await client.post(f"/v1/sessions/{session_id}/questions", json=QUESTION)).json()["id"]
    document_id = (await client.get("/v1/documents")).json()["data"][0]["id"]
    share = (await client.post(f"/v1/documents/{document_id}/shares", json={"with": "organization"})).json()
    await client.delete(f"/v1/documents/{document_id}/shares/{share['id']}")
    await client.patch(f"/v1/documents/{document_id}", json={"title": "Secret title"})
    await client.delete(f"/v1/documents/{document_id}")
    async with client.services.db.reading() as uow:
        rows = await uow.records.audited(limit=100)
        asked = await uow.records.audited(limit=100, target=session_id)
    assert [row.action for row in reversed(rows)] == [
        "key", "upload", "session", "ask", "share", "unshare", "change", "delete",
    ]  # fmt: skip
    by_ann = [row for row in rows if row.action != "key"]
    assert {(row.user_id, row.key_id) for row in by_ann} == {(ann.user_id, ann.key_id)}
    assert [(row.target, row.other) for row in asked] == [(answer_id, session_id), (session_id, document_id)]
    written = " ".join(f"{row.action} {row.target} {row.other}" for row in rows)
    assert not any(word in written for word in ("keeper", "Marta", "notes", "Secret"))


async def test_old_records_go(open_client, person, session_of, clock, eventually):
    async with open_client({"audit_days": 1, "sweep_interval_s": 0.05}, clock=clock) as client:
        await session_of(client)
        clock.advance(2 * 86400)

        async def left():
            async with client.services.db.reading() as uow:
                return await uow.records.audited(limit=10)

        async with asyncio.timeout(60):
            while await left():  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.02)
