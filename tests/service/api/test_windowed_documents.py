"""Documents of which only a part stays in memory: uploaded, shown, asked about, found again."""

import json

import pytest

from service.engine.fake import BYTES_PER_TOKEN, INDEX_NBYTES_PER_TOKEN, FakeEngine
from service.engine.messages import Retention, SpanRef

pytestmark = pytest.mark.anyio
PAGE = "Page {}. The keeper of lighthouse number {} is Marta Kovalenko, who has the key of its door. " * 10
N_PAGES = 30
LONG = "\f".join(PAGE.format(*[n] * 20) for n in range(1, N_PAGES + 1)).encode()
"""About 28,000 tokens, each a byte."""
CUSTOM = {"sink_tokens": 8, "summary_tokens": 0, "window_tokens": 100}


@pytest.fixture
async def client(anyio_backend, open_client, reader):
    async with open_client(read=reader) as client:
        yield client


@pytest.fixture
def ask(client):
    """A question to a new session, or one that there is; the answer."""

    async def asked(document_id, session_id=None, question="Who?", **options):
        if session_id is None:
            session_id = (await client.post("/v1/sessions", json={"document_ids": [document_id]})).json()["id"]
        path = f"/v1/sessions/{session_id}/questions"
        response = await client.post(path, json={"question": question, **options})
        assert response.status_code == 200, response.text
        return session_id, response.json()

    return asked


async def page_start(client, document_id, number):
    return (await client.get(f"/v1/documents/{document_id}/pages/{number}")).json()["token_start"]


async def test_a_document_longer_than_the_context_is_accepted_without_a_wish(client, made, engine):
    body = await made(client, LONG)
    assert (body["status"], body["retention"]) == ("ready", {"preset": "automatic"})
    chosen = body["snapshot"]["retention"]
    assert (chosen["preset"], chosen["automatic"], body["snapshot"]["resident_tokens"]) == ("small", True, 272)
    assert engine.built[0].retention == Retention(16, 0, 256, 2048, 256)


async def test_a_part_of_a_document_is_kept_as_it_was_asked_for(client, made, engine):
    body = await made(client, LONG, retention="balanced")
    n_tokens = body["token_count"]
    assert (body["status"], body["retention"]) == ("ready", {"preset": "balanced"})
    assert n_tokens > 20_000
    snapshot = body["snapshot"]
    assert snapshot["retention"] == {
        "preset": "balanced", "automatic": False, "sink_tokens": 16, "summary_tokens": 1024, "window_tokens": 512,
        "segment_tokens": 2048, "n_segments": -(-n_tokens // 2048), "fetch_tokens": 256,
    }  # fmt: skip
    assert (snapshot["resident_tokens"], snapshot["resident_nbytes"]) == (1552, 1552 * BYTES_PER_TOKEN)
    assert (snapshot["nbytes"], snapshot["index_nbytes"]) == (
        n_tokens * BYTES_PER_TOKEN, n_tokens * INDEX_NBYTES_PER_TOKEN,
    )  # fmt: skip
    assert engine.built[0].retention == Retention(16, 1024, 512, 2048, 256)


async def test_a_document_that_fits_is_kept_whole_unless_it_is_asked_for(client, made, engine):
    whole = await made(client, LONG[:5000])
    assert whole["snapshot"]["retention"]["preset"] == "full"
    assert (whole["snapshot"]["resident_tokens"], whole["snapshot"]["resident_nbytes"]) == (whole["token_count"], None)
    small = await made(client, LONG[:5000], retention=json.dumps(CUSTOM))
    assert small["id"] != whole["id"]
    assert small["retention"] == {"preset": "custom"} | CUSTOM
    assert small["snapshot"]["retention"] | CUSTOM == small["snapshot"]["retention"]
    assert small["snapshot"]["resident_tokens"] == 108
    assert [request.retention for request in engine.built] == [None, Retention(8, 0, 100, 0, 256)]


async def test_the_same_wish_finds_the_document_again(client, made, upload):
    bodies = [await made(client, LONG, retention=wish) for wish in ("", "small", json.dumps(CUSTOM))]
    for body, wish in zip(bodies, (None, " small ", json.dumps(CUSTOM, indent=1)), strict=True):
        again = await upload(client, LONG, **({} if wish is None else {"retention": wish}))
        assert (again.status_code, again.json()["id"]) == (200, body["id"])


async def test_full_is_refused_for_a_document_that_does_not_fit(client, made, engine):
    body = await made(client, LONG, retention="full")
    assert (body["status"], body["error"]["code"]) == ("failed", "context_length_exceeded")
    assert "`balanced` or `small`" in body["error"]["message"]
    assert engine.built == []


async def test_without_index_heads_nothing_is_kept_in_part(open_client, made, upload):
    async with open_client(engine=FakeEngine(max_context=20_000, n_index_heads=0)) as client:
        body = await made(client, LONG)
        assert (body["status"], body["error"]["code"]) == ("failed", "context_length_exceeded")
        assert "preread models index-heads" in body["error"]["message"]
        refused = await upload(client, LONG, retention="small")
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "no_index_heads")


async def test_the_longest_document(open_client, made):
    async with open_client({"max_document_tokens": 25_000}) as client:
        body = await made(client, LONG)
    assert (body["status"], body["error"]["code"]) == ("failed", "document_too_long")
    assert "25,000" in body["error"]["message"]


async def test_an_answer_says_which_pages_it_could_see_and_how(client, made, engine, ask):
    document_id = (await made(client, LONG, retention="balanced"))["id"]
    first = await page_start(client, document_id, 7)
    engine.fetched = [SpanRef(first + 64, 32), SpanRef(first + 500, 32)]
    engine.reply = ["The keeper of lighthouse number 7 is Marta Kovalenko."]
    _, answer = await ask(document_id)
    parts = [(part["mode"], part["first_page"], part["last_page"]) for part in answer["provenance"]]
    assert parts == [("verbatim", 30, 30), ("fetched", 7, 7), ("summary", 1, 6), ("summary", 8, 29)]
    assert [citation["page"] for citation in answer["citations"]] == [7]
    assert answer["notice"] is None
    assert answer["usage"]["first_pass_tokens"] == answer["usage"]["prefilled_tokens"]
    assert answer["timings"]["fetch_ms"] == 0.1


async def test_a_notice_when_the_pages_that_are_quoted_were_not_read(client, made, engine, ask):
    document_id = (await made(client, LONG, retention="balanced"))["id"]
    engine.fetched = [SpanRef(await page_start(client, document_id, 7), 32)]
    engine.reply = ["The keeper of lighthouse number 9 is Marta Kovalenko."]
    session_id, answer = await ask(document_id)
    assert [citation["page"] for citation in answer["citations"]] == [9]
    assert "only summarized" in answer["notice"]
    engine.fetched = []
    _, answer = await ask(document_id, session_id)
    assert "only summarized" in answer["notice"]
    turns = (await client.get(f"/v1/sessions/{session_id}")).json()["turns"]
    assert [turn["answer"] for turn in turns][1] == answer


async def test_what_was_fetched_is_known_at_the_next_turn_also_after_a_restart_and_in_a_fork(
    open_client, made, reader, engine
):
    spans = [SpanRef(4000, 32), SpanRef(9000, 64)]
    async with open_client(read=reader) as client:
        document_id = (await made(client, LONG, retention="balanced"))["id"]
        session_id = (await client.post("/v1/sessions", json={"document_ids": [document_id]})).json()["id"]
        engine.fetched = spans
        await client.post(f"/v1/sessions/{session_id}/questions", json={"question": "One?"})
        engine.fetched = None
    async with open_client(read=reader) as client:
        fork = (await client.post(f"/v1/sessions/{session_id}/fork")).json()["id"]
        for asked in (session_id, fork):
            response = await client.post(f"/v1/sessions/{asked}/questions", json={"question": "Two?"})
            assert response.json()["provenance"]
            assert engine.answered[-1].turns[0].spans == spans
            assert engine.answered[-1].retention == Retention(16, 1024, 512, 2048, 256)


async def test_a_question_has_the_room_behind_a_segment(open_client, made, reader):
    engine = FakeEngine(max_context=4096, tail_tokens=800)
    async with open_client(read=reader, engine=engine) as client:
        document_id = (await made(client, LONG))["id"]
        session_id = (await client.post("/v1/sessions", json={"document_ids": [document_id]})).json()["id"]
        path = f"/v1/sessions/{session_id}/questions"
        assert (await client.post(path, json={"question": "Who?"})).status_code == 200
        refused = await client.post(path, json={"question": "x" * 1000})
        assert "holds 800 tokens beside its document" in refused.json()["detail"]
        assert "of which what is fetched for a question may take 256" in refused.json()["detail"]


async def test_a_lost_snapshot_is_built_again_as_it_was(client, made, engine, ask):
    document_id = (await made(client, LONG, retention="small"))["id"]
    engine.miss_next("checksum")
    _, answer = await ask(document_id)
    assert answer["cache"]["miss_reason"] == "checksum"
    assert [request.retention for request in engine.built] == [Retention(16, 0, 256, 2048, 256)] * 2
    assert answer["usage"]["prefilled_tokens"] > answer["usage"]["document_tokens"]


async def test_when_only_what_is_in_memory_was_lost_nothing_was_computed(client, made, engine, ask):
    document_id = (await made(client, LONG))["id"]
    (kept,) = engine.snapshots.items()
    engine.miss_next("checksum")
    inject = engine._injected

    def only_what_is_in_memory(request, kind):
        failure = inject(request, kind)
        engine.snapshots[kept[0]] = kept[1]
        return failure

    engine._injected = only_what_is_in_memory
    _, answer = await ask(document_id)
    assert (answer["cache"]["source"], answer["cache"]["miss_reason"]) == ("host", "checksum")
    assert answer["usage"]["reused_tokens"] == answer["usage"]["document_tokens"]


async def test_a_document_that_no_longer_fits_whole_is_read_again_in_parts(open_client, made, reader):
    async with open_client(read=reader) as client:
        body = await made(client, LONG[:9000])
        assert body["snapshot"]["retention"]["preset"] == "full"
    smaller = FakeEngine(max_context=20_000, resident_tokens=5000)
    async with open_client(read=reader, engine=smaller) as client:
        session_id = (await client.post("/v1/sessions", json={"document_ids": [body["id"]]})).json()["id"]
        response = await client.post(f"/v1/sessions/{session_id}/questions", json={"question": "Who?"})
        assert response.json()["cache"]["miss_reason"] == "absent"
        shown = (await client.get(f"/v1/documents/{body['id']}")).json()["snapshot"]
        assert (shown["retention"]["preset"], shown["retention"]["n_segments"]) == ("small", 5)
        assert smaller.answered[0].retention == Retention(16, 0, 256, 2048, 256)


async def test_a_restart_while_it_is_compacted(open_client, made, upload, until, reader, engine):
    async with open_client(read=reader) as client:
        engine.chunk_delay_s = 5
        document_id = (await upload(client, LONG, retention="balanced")).json()["id"]
        await until(client, document_id, "prefilling")
        async with client.services.db.writing() as uow:
            await uow.documents.change(document_id, status="compacting")
    engine.chunk_delay_s = 0
    async with open_client(read=reader) as client:
        body = await until(client, document_id)
    assert (body["status"], body["snapshot"]["retention"]["preset"]) == ("ready", "balanced")


async def test_the_schema_describes_it(client):
    schema = (await client.get("/schema/openapi.json")).json()
    models = schema["components"]["schemas"]
    assert {"preset", "segment_tokens"} <= set(models["RetentionBody"]["properties"])
    assert "notice" in models["AnswerBody"]["required"]
    assert {"resident_tokens", "index_nbytes", "retention"} <= set(models["SnapshotBody"]["properties"])
    form = schema["paths"]["/v1/documents"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert "window_tokens" in form["properties"]["retention"]["description"]
