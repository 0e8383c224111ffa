"""Two owners: every address of one, tried with the other's key, is not there. The addresses are those of the schema, so
that a new one cannot be forgotten."""

import re

import pytest

pytestmark = pytest.mark.anyio
BODIES = {
    ("PATCH", "/v1/documents/{document_id}"): {"title": "Mine"},
    ("POST", "/v1/sessions/{session_id}/questions"): {"question": "Who?"},
    ("POST", "/v1/documents/{document_id}/shares"): {"with": "organization"},
    ("POST", "/v1/sessions/{session_id}/shares"): {"with": "organization"},
    ("POST", "/v1/uploads/{upload_id}/complete"): {"part_ids": []},
}
"""Of calls that would be refused without one, whoever makes them."""
MISSING = {
    "document_id": "doc_00000000000000000000000000", "session_id": "ses_00000000000000000000000000",
    "answer_id": "ans_00000000000000000000000000", "share_id": "shr_00000000000000000000000000", "number": "1",
    "file_id": "file-00000000000000000000000000", "upload_id": "upload_00000000000000000000000000",
    "response_id": "resp_00000000000000000000000000", "model": "another",
}  # fmt: skip


@pytest.fixture
def schema(make_app):
    return make_app().openapi_schema.to_schema()


@pytest.fixture
async def world(client, person, upload, until):
    """Ann has a document, a session, an answer and a share; Bob, of her organization, has nothing."""
    ann, bob = await person(client.services), await person(client.services, "bob")
    eve = await person(client.services, "eve", organization="others")
    client.headers = ann.headers
    document = (await upload(client)).json()["id"]
    await until(client, document)
    session = (await client.post("/v1/sessions", json={"document_ids": [document]})).json()["id"]
    answer = (await client.post(f"/v1/sessions/{session}/questions", json={"question": "Who?"})).json()["id"]
    await client.post(f"/v1/documents/{document}/shares", json={"with": "link"})
    share = (await client.get(f"/v1/documents/{document}/shares")).json()["data"][0]["id"]
    announced = {"bytes": 9, "filename": "a.txt", "mime_type": "text/plain", "purpose": "user_data"}
    uploaded = (await client.post("/v1/uploads", json=announced)).json()["id"]
    asked = {"model": "demo", "input": "Who?", "metadata": {"document_ids": document}}
    response = (await client.post("/v1/responses", json=asked)).json()["id"]
    client.headers = {}
    ids = {"document_id": document, "session_id": session, "answer_id": answer, "share_id": share, "number": "1"}
    ids |= {"file_id": document.replace("doc_", "file-"), "upload_id": uploaded, "response_id": response}
    ids["model"] = "another"
    return ann, (bob, eve), ids


def filled(path, ids):
    names = re.findall(r"\{(\w+)\}", path)
    assert set(names) <= set(ids), f"{path}: say in this test which id of another owner that is"
    return path.format(**{name: ids[name] for name in names})


async def test_every_id_of_another_is_not_there(client, world, schema):
    ann, strangers, ids = world
    tried = 0
    for method, path in calls_of(schema):
        if "{" not in path:
            continue
        for stranger in strangers:
            options = {"headers": stranger.headers, "json": BODIES.get((method, path))}
            theirs = await client.request(method, filled(path, ids), **options)
            missing = await client.request(method, filled(path, MISSING), **options)
            assert (theirs.status_code, missing.status_code) == (404, 404), f"{method} {path}: {theirs.text}"
            assert same(theirs) == same(missing), f"{method} {path}"
            tried += 1
    assert tried >= 2 * 18
    mine = await client.get(f"/v1/documents/{ids['document_id']}", headers=ann.headers)
    assert (mine.status_code, mine.json()["title"]) == (200, "notes.txt")
    assert len((await client.get(f"/v1/sessions/{ids['session_id']}", headers=ann.headers)).json()["turns"]) == 1


async def test_no_list_has_anything_of_another(client, world, schema):
    _, strangers, ids = world
    for method, path in calls_of(schema):
        if method != "GET" or "{" in path or path.startswith(("/health", "/metrics")):
            continue
        for stranger in strangers:
            for query in ({}, {"shared": "true"}):
                listed = await client.get(path, headers=stranger.headers, params=query)
                assert not any(id in listed.text for name, id in ids.items() if name not in ("number", "model")), path
    for path in ("/v1/documents", "/v1/sessions"):
        name = "document_id" if path.endswith("documents") else "session_id"
        theirs, missing = [
            await client.get(path, headers=strangers[0].headers, params={"after": found[name]})
            for found in (ids, MISSING)
        ]
        assert theirs.status_code in (404, 422)
        assert same(theirs) == same(missing)


async def test_every_call_but_health_wants_a_key(client, world, schema):
    _, _, ids = world
    for method, path in calls_of(schema):
        answered = await client.request(method, filled(path, ids), json=BODIES.get((method, path)))
        assert (answered.status_code == 401) is not path.startswith("/health"), f"{method} {path}"


async def test_a_session_is_not_begun_over_what_is_anothers(client, world):
    _, strangers, ids = world
    refusals = []
    for document_id in (ids["document_id"], MISSING["document_id"]):
        body = {"document_ids": [document_id]}
        refused = await client.post("/v1/sessions", json=body, headers=strangers[0].headers)
        assert refused.status_code == 404
        refusals.append(refused.text.replace(document_id, "ID").replace(refused.json()["instance"], ""))
    assert refusals[0] == refusals[1]


async def test_the_same_bytes_of_another_owner_are_another_document(client, world, upload, until, engine):
    """What another one uploaded spares nothing: it is read again, and nothing is named by it."""
    _, (bob, _), ids = world
    client.headers = bob.headers
    response = await upload(client)
    assert response.status_code == 202
    body = await until(client, response.json()["id"])
    assert body["id"] != ids["document_id"]
    assert body["snapshot"]["prefilled_tokens"] == body["token_count"]
    assert {request.document.owner_id for request in engine.built} > {bob.user_id}
    assert (await upload(client)).status_code == 200, "their own bytes are known"


def calls_of(schema):
    return [(method.upper(), path) for path, methods in schema["paths"].items() for method in methods]


def same(response):
    """A problem without what names the request or what was asked for."""
    body = response.json()
    return {name: value for name, value in body.items() if name != "instance"}
