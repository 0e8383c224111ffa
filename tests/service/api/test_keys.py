"""Requests with keys, with keys that are not for what they ask, and without."""

import pytest
from structlog.testing import capture_logs

from service.core.credentials import new_secret
from service.core.key_ring import KeyRing

pytestmark = pytest.mark.anyio


async def test_without_any_key_everything_is_open_and_from_the_first_on_nothing_is(client, person):
    assert (await client.get("/v1/documents")).status_code == 200
    passed_on = await client.get("/v1/documents", headers={"Authorization": "Basic dXNlcjpwYXNz"})
    assert passed_on.status_code == 200, "it is for what stands in front"
    ann = await person(client.services)
    for method, path in (("GET", "/v1/documents"), ("GET", "/metrics"), ("GET", "/schema"), ("DELETE", "/no/such")):
        refused = await client.request(method, path)
        assert refused.status_code == 401, path
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.headers["www-authenticate"] == 'Bearer realm="preread"'
        assert refused.json()["error"]["code"] == "unauthenticated"
        assert refused.json()["instance"]
    assert (await client.get("/health/live")).status_code == 200
    assert (await client.get("/v1/documents", headers=ann.headers)).json()["data"] == []


async def test_the_last_key_revoked_does_not_open_the_server(client, person):
    ann = await person(client.services)
    await KeyRing(client.services.db, client.services.clock).revoke(ann.key_id)
    refused = await client.get("/v1/documents", headers=ann.headers)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].endswith('error="invalid_token"')
    assert (await client.get("/v1/documents")).status_code == 401


async def test_tokens_that_are_none(client, person):
    ann = await person(client.services)
    good = ann.headers["Authorization"]
    secret = good.partition(".")[2]
    wrong = [
        "", "Bearer", "Bearer x", f"Basic {good[7:]}", good[:-1] + ("A" if good[-1] != "A" else "B"),
        f"Bearer {ann.key_id}.{new_secret()}", f"Bearer key_00000000000000000000000000.{secret}", good + "x",
        f"Bearer shr_00000000000000000000000000.{secret}",
    ]  # fmt: skip
    for value in wrong:
        assert (await client.get("/v1/documents", headers={"Authorization": value})).status_code == 401, value
    twice = [("Authorization", good), ("Authorization", good)]
    assert (await client.get("/v1/documents", headers=twice)).status_code == 401
    assert (await client.get("/v1/documents", headers={"authorization": good.replace("Bearer", "bearer")})).is_success


async def test_a_key_is_for_its_time(open_client, person, clock):
    async with open_client(clock=clock) as client:
        ann = await person(client.services, ttl_s=60)
        assert (await client.get("/v1/documents", headers=ann.headers)).status_code == 200
        clock.advance(61)
        assert (await client.get("/v1/documents", headers=ann.headers)).status_code == 401


async def test_scopes(client, person, upload, until):
    ann = await person(client.services)
    reader, asker, prober = [await person(client.services, scopes=(scope,)) for scope in ("read", "ask", "metrics")]
    client.headers = ann.headers
    document_id = (await upload(client)).json()["id"]
    await until(client, document_id)

    async def status(who, method, path, **options):
        return (await client.request(method, path, headers=who.headers, **options)).status_code

    new = {"json": {"document_ids": [document_id]}}
    assert await status(reader, "GET", f"/v1/documents/{document_id}") == 200
    assert await status(reader, "POST", "/v1/sessions", **new) == 403
    assert await status(asker, "POST", "/v1/sessions", **new) == 201
    assert await status(asker, "DELETE", f"/v1/documents/{document_id}") == 403
    assert await status(asker, "POST", "/v1/documents", files={"file": ("a.txt", b"x")}) == 403
    assert await status(prober, "GET", "/v1/documents") == 403
    assert await status(prober, "GET", "/metrics") == 200
    assert await status(ann, "GET", "/metrics") == 403, "the counts are of all owners"
    refused = await client.delete("/v1/documents/doc_no", headers=asker.headers)
    assert refused.json()["error"]["code"] == "scope_missing", "before it is looked up"


async def test_only_a_hash_is_stored_and_the_last_use_is_written_later(client, person, settings):
    ann = await person(client.services)
    assert (await client.get("/v1/documents", headers=ann.headers)).status_code == 200
    ring = KeyRing(client.services.db, client.services.clock)
    (key,) = await ring.all()
    assert key.row.last_used_at is None
    await client.services.keys.flush()
    (key,) = await ring.all()
    assert key.row.last_used_at
    secret = ann.headers["Authorization"].partition(".")[2].encode()
    assert key.row.digest.encode() != secret
    assert all(secret not in path.read_bytes() for path in settings.data_dir.rglob("preread.sqlite3*"))


async def test_the_first_key_comes_with_the_settings(open_client, monkeypatch, tmp_path):
    first, second = f"key_aaaaaaaaaa.{new_secret()}", f"key_bbbbbbbbbb.{new_secret()}"

    async def statuses(client):
        headers = [{"Authorization": f"Bearer {token}"} for token in (first, second)]
        return [(await client.get("/metrics", headers=each)).status_code for each in headers]

    async with open_client() as client:
        made = (await client.post("/v1/documents", files={"file": ("a.txt", b"Made before.")})).json()
    monkeypatch.setenv("PREREAD_ADMIN_KEY", first)
    async with open_client() as client:
        assert await statuses(client) == [200, 401]
        mine = await client.get(f"/v1/documents/{made['id']}", headers={"Authorization": f"Bearer {first}"})
        assert mine.status_code == 200, "what was made without keys is the first key's"
    monkeypatch.delenv("PREREAD_ADMIN_KEY")
    file = tmp_path / "key"
    file.write_text(second + "\n")
    async with open_client({"admin_key_file": str(file)}) as client:
        assert await statuses(client) == [401, 200], "another one takes its place"
    monkeypatch.setenv("PREREAD_ADMIN_KEY", first)
    with capture_logs() as logs:
        async with open_client() as client:
            assert await statuses(client) == [401, 401], "what was revoked stays so"
    assert any("was revoked" in line["event"] and line["key_id"] == "key_aaaaaaaaaa" for line in logs)


@pytest.mark.anyio
async def test_a_fault_while_a_key_is_looked_at_is_a_problem_too(client, monkeypatch):
    async def broken(token):
        raise RuntimeError("something inside")

    monkeypatch.setattr(client.services.keys, "principal", broken)
    response = await client.get("/v1/documents")
    problem = response.json()
    assert (response.status_code, problem["type"]) == (500, "urn:preread:problem:internal_error")
    assert problem["instance"].endswith(response.headers["X-Request-ID"])
    assert "inside" not in response.text
