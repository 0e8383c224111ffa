"""The document calls: look, list, change, read, cancel, delete, expire."""

import asyncio
from itertools import pairwise

import pytest

from service.engine.fake import FakeEngine

PAGES = "\f".join(f"Page {n} says that the fee is {n}00 pounds. " * 3 for n in range(1, 6)).encode()
NOWHERE = "doc_00000000000000000000000000"


@pytest.fixture
async def client(anyio_backend, open_client, reader, store, clock):
    async with open_client(read=reader, store=store, clock=clock) as client:
        yield client


@pytest.mark.anyio
@pytest.mark.parametrize("document_id", [NOWHERE, "x", "..%2F..%2Fetc", "doc_%00", "\N{PARTY POPPER}"])
async def test_unknown_ids_are_not_found_everywhere(client, document_id):
    base = f"/v1/documents/{document_id}"
    answers = [
        await client.get(base),
        await client.patch(base, json={"title": "x"}),
        await client.delete(base),
        await client.post(f"{base}/cancel"),
        await client.get(f"{base}/pages/1"),
        await client.get(f"{base}/file"),
        await client.get(f"{base}/events"),
    ]
    assert {answer.status_code for answer in answers} == {404}
    assert {answer.headers["content-type"] for answer in answers} == {"application/problem+json"}


@pytest.mark.anyio
async def test_the_list_is_newest_first_and_in_pages(client, made, clock):
    ids = []
    for n in range(5):
        ids.insert(0, (await made(client, f"text number {n}".encode()))["id"])
        clock.advance(n % 2)
    first = (await client.get("/v1/documents", params={"limit": 2})).json()
    assert ([d["id"] for d in first["data"]], first["has_more"]) == (ids[:2], True)
    second = (await client.get("/v1/documents", params={"limit": 2, "after": ids[1]})).json()
    assert ([d["id"] for d in second["data"]], second["has_more"]) == (ids[2:4], True)
    last = (await client.get("/v1/documents", params={"limit": 2, "after": ids[3]})).json()
    assert ([d["id"] for d in last["data"]], last["has_more"]) == (ids[4:], False)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("params", "param"),
    [({"limit": 0}, "limit"), ({"limit": 101}, "limit"), ({"limit": "x"}, "limit"), ({"after": NOWHERE}, "after")],
)
async def test_list_parameters_are_checked(client, params, param):
    response = await client.get("/v1/documents", params=params)
    assert (response.status_code, response.json()["error"]["param"]) == (404 if param == "after" else 422, param)


@pytest.mark.anyio
async def test_pages_have_their_text_and_their_tokens(client, made):
    body = await made(client, PAGES)
    assert body["page_count"] == 5
    url = f"/v1/documents/{body['id']}/pages"
    pages = [(await client.get(f"{url}/{n}")).json() for n in range(1, 6)]
    assert [p["text"] for p in pages] == PAGES.decode().split("\f")
    assert all(a["token_end"] == b["token_start"] for a, b in pairwise(pages))
    assert 0 < pages[0]["token_start"] < pages[-1]["token_end"] < body["token_count"]
    for number in (0, 6, 10**30):
        assert (await client.get(f"{url}/{number}")).status_code == 404, number
    assert (await client.get(f"{url}/first")).status_code == 404


@pytest.mark.anyio
async def test_pages_are_a_conflict_while_they_are_being_read(client, upload, until, reader):
    reader.gate.clear()
    document_id = (await upload(client, PAGES)).json()["id"]
    await until(client, document_id, "parsing")
    response = await client.get(f"/v1/documents/{document_id}/pages/1")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "document_not_ready")
    reader.gate.set()
    await until(client, document_id)


@pytest.mark.anyio
async def test_the_original_with_ranges(client, made):
    body = await made(client, PAGES, 'a "q" \N{PARTY POPPER}.txt')
    url = f"/v1/documents/{body['id']}/file"
    whole = await client.get(url)
    assert (whole.status_code, whole.content) == (200, PAGES)
    assert whole.headers["content-type"] == "text/plain"
    assert whole.headers["x-content-type-options"] == "nosniff"
    assert "filename*=UTF-8''a%20%22q%22%20%F0%9F%8E%89.txt" in whole.headers["content-disposition"]
    etag = whole.headers["etag"]
    part = await client.get(url, headers={"range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, PAGES[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{len(PAGES)}"
    assert (await client.get(url, headers={"range": "bytes=-7"})).content == PAGES[-7:]
    same = await client.get(url, headers={"range": "bytes=0-0", "if-range": etag})
    assert (same.status_code, same.content) == (206, PAGES[:1])
    other = await client.get(url, headers={"range": "bytes=0-0", "if-range": '"other"'})
    assert (other.status_code, other.content) == (200, PAGES)
    beyond = await client.get(url, headers={"range": f"bytes={len(PAGES)}-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{len(PAGES)}")
    assert (beyond.headers["content-type"], beyond.json()["status"]) == ("application/problem+json", 416)


@pytest.mark.anyio
async def test_what_can_be_changed(client, made, clock):
    body = await made(client, ttl_s=100)
    assert body["expires_at"] is not None
    url = f"/v1/documents/{body['id']}"
    changed = (await client.patch(url, json={"title": " New ", "pinned": True, "ttl_s": None})).json()
    assert (changed["title"], changed["pinned"], changed["expires_at"]) == ("New", True, None)
    assert (await client.patch(url, json={})).json() == changed
    later = (await client.patch(url, json={"ttl_s": 60, "visibility": "private"})).json()
    assert later["expires_at"].startswith("2027-01-15T08:01:00")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"title": ""}, "title"),
        ({"title": "x" * 301}, "title"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": 10**12}, "ttl_s"),
        ({"visibility": "public"}, "visibility"),
        ({"pinned": "yes"}, "pinned"),
    ],
)
async def test_changes_are_checked(client, made, change, param):
    body = await made(client)
    response = await client.patch(f"/v1/documents/{body['id']}", json=change)
    assert (response.status_code, response.json()["error"]["param"]) == (422, param)
    assert (await client.get(f"/v1/documents/{body['id']}")).json() == body


@pytest.mark.anyio
async def test_a_malformed_change_is_a_bad_request(client, made):
    body = await made(client)
    url = f"/v1/documents/{body['id']}"
    headers = {"content-type": "application/json"}
    assert (await client.patch(url, content=b"{", headers=headers)).status_code == 400
    assert (await client.patch(url, json={"colour": "red"})).status_code == 422
    assert (await client.patch(url, json=[1])).status_code == 422


@pytest.mark.anyio
async def test_a_deleted_document_is_gone_everywhere(client, made, engine, store, settings):
    body = await made(client)
    response = await client.delete(f"/v1/documents/{body['id']}")
    assert response.status_code == 200
    removed = {part["tier"]: (part["objects"], part["nbytes"]) for part in response.json()["removed"]}
    assert removed == {
        "file": (1, body["nbytes"]),
        "text": (1, body["nbytes"]),
        "turns": (0, 0),
        "host": (1, body["token_count"] * 64),
        "disk": (2, 20),
    }
    assert store.deleted == [("local", "document", body["id"])]
    assert (await client.get(f"/v1/documents/{body['id']}")).status_code == 404
    assert (await client.delete(f"/v1/documents/{body['id']}")).status_code == 404
    assert list(settings.files_dir.iterdir()) == []
    assert (await client.get("/v1/documents")).json()["data"] == []


@pytest.mark.anyio
@pytest.mark.parametrize("stage", ["parsing", "prefilling"])
async def test_delete_and_cancel_at_every_stage(open_client, upload, until, reader, store, settings, stage):
    engine = FakeEngine(max_context=20_000, chunk_delay_s=0.2)
    async with open_client(read=reader, store=store, engine=engine) as client:
        for action in ("cancel", "delete"):
            if stage == "parsing":
                reader.gate.clear()
            document_id = (await upload(client, PAGES * 9)).json()["id"]
            await until(client, document_id, stage)
            url = f"/v1/documents/{document_id}"
            if action == "cancel":
                body = (await client.post(f"{url}/cancel")).json()
                assert (body["status"], body["error"]["code"]) == ("cancelled", "cancelled")
                assert (await client.post(f"{url}/cancel")).status_code == 200
                assert (await client.get(f"{url}/pages/1")).status_code == 404
                assert (await client.get(f"{url}/file")).status_code == 404
            else:
                assert (await client.delete(url)).status_code == 200
                assert (await client.get(url)).status_code == 404
            reader.gate.set()
            assert engine.snapshots == {}
            assert (await engine.stats()).running == 0
            assert ("local", "document", document_id) in store.deleted
            assert list(settings.files_dir.iterdir()) == []


@pytest.mark.anyio
async def test_a_ready_document_cannot_be_cancelled(client, made):
    body = await made(client)
    response = await client.post(f"/v1/documents/{body['id']}/cancel")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "already_ended")
    assert (await client.get(f"/v1/documents/{body['id']}")).json() == body


@pytest.mark.anyio
async def test_two_deletions_at_once_both_end_well(client, made):
    body = await made(client)
    url = f"/v1/documents/{body['id']}"
    statuses = sorted(r.status_code for r in await asyncio.gather(client.delete(url), client.delete(url)))
    assert statuses in ([200, 200], [200, 404])


@pytest.mark.anyio
async def test_a_document_expires_for_whoever_looks(client, made, clock, settings):
    body = await made(client, ttl_s=100)
    kept = await made(client, b"another text", ttl_s=100)
    assert (await client.patch(f"/v1/documents/{kept['id']}", json={"pinned": True})).status_code == 200
    clock.advance(101)
    assert (await client.get(f"/v1/documents/{body['id']}")).status_code == 404
    assert [d["id"] for d in (await client.get("/v1/documents")).json()["data"]] == [kept["id"]]
    assert [path.name for path in settings.files_dir.iterdir()] == [kept["id"]]
    again = await made(client, ttl_s=100)
    assert again["id"] != body["id"]


@pytest.mark.anyio
async def test_the_same_upload_after_its_time_is_a_new_document(client, made, upload, clock):
    body = await made(client, ttl_s=100)
    clock.advance(101)
    response = await upload(client, ttl_s=100)
    assert response.status_code == 202
    assert response.json()["id"] != body["id"]


@pytest.mark.anyio
async def test_the_sweeper_removes_what_nobody_looks_at(open_client, made, reader, clock, files_left):
    async with open_client({"sweep_interval_s": 0.05}, read=reader, clock=clock) as client:
        await made(client, ttl_s=100)
        clock.advance(101)
        assert await files_left() == []
