"""Health, metrics, the schema, request ids, and logs that tell nothing of what people read and ask."""

import json
import re

import pytest

from service.db.engine import Database
from service.logs import configure_logging

SECRET = "Zanzibar quince marmalade"


@pytest.mark.anyio
async def test_live_and_ready(client, engine):
    assert (await client.get("/health/live")).json() == {"status": "live"}
    ready = await client.get("/health/ready")
    assert ready.status_code == 200
    assert ready.json() == {"status": "ready", "engine": "fake", "model": "fake", "engine_ms": 0.1, "draft_model": None}


@pytest.mark.anyio
async def test_not_ready_says_why_and_is_asked_once_a_second(open_client, engine, clock):
    async with open_client(clock=clock) as client:
        assert (await client.get("/health/ready")).status_code == 200
        engine.lose()
        assert (await client.get("/health/ready")).status_code == 200
        clock.advance(1.1)
        response = await client.get("/health/ready")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        assert "engine" in response.json()["detail"]
        assert int(response.headers["retry-after"]) >= 1
        engine.come_back()
        clock.advance(1.1)
        assert (await client.get("/health/ready")).status_code == 200
        assert (await client.get("/health/live")).status_code == 200


@pytest.mark.anyio
async def test_a_disk_below_its_floor_is_not_ready(open_client):
    async with open_client({"free_floor_bytes": 1 << 60}) as client:
        response = await client.get("/health/ready")
        assert (response.status_code, "disk" in response.json()["detail"]) == (503, True)


@pytest.mark.anyio
async def test_metrics_have_routes_and_never_paths(client, made, engine):
    body = await made(client)
    await client.get(f"/v1/documents/{body['id']}")
    await client.get("/v1/documents/doc_unknown")
    await client.get("/nowhere/at/all")
    await client.request("BREW", "/v1/documents")
    text = (await client.get("/metrics")).text
    route = 'method="GET",route="/v1/documents/{document_id}"'
    assert f'preread_http_requests_total{{{route},status="404"}} 1.0' in text
    assert 'route="unmatched",status="404"' in text
    assert 'preread_documents{status="ready"} 1.0' in text
    assert f"preread_engine_document_prefill_tokens_total {body['token_count']}.0" in text
    assert "preread_engine_up 1.0" in text
    assert body["id"] not in text
    assert "nowhere" not in text
    assert "BREW" not in text
    engine.lose()
    assert "preread_engine_up 0.0" in (await client.get("/metrics")).text


@pytest.mark.anyio
async def test_the_schema_needs_no_network_and_names_every_call(client):
    schema = (await client.get("/schema/openapi.json")).json()
    upload = schema["paths"]["/v1/documents"]["post"]
    form = upload["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["required"] == ["file"]
    assert {"202", "400", "413", "415", "422", "507"} <= set(upload["responses"])
    assert "application/problem+json" in upload["responses"]["413"]["content"]
    missing = await client.get("/schema/swagger")
    assert (missing.status_code, missing.headers["content-type"]) == (404, "application/problem+json")
    for page in ("/schema", "/schema/openapi.json"):
        response = await client.get(page)
        assert response.status_code == 200
        assert not re.search(r"(?:src|href)=.https?://", response.text)


@pytest.mark.anyio
async def test_each_request_has_an_id(client):
    own = await client.get("/nowhere", headers={"x-request-id": "abc-1"})
    assert own.headers["x-request-id"] == "abc-1"
    assert own.json()["instance"] == "urn:preread:request:abc-1"
    made = await client.get("/nowhere", headers={"x-request-id": "a b\tc"})
    assert re.fullmatch(r"req_[0-9a-z]{26}", made.headers["x-request-id"])


@pytest.mark.anyio
async def test_logs_tell_nothing_of_the_texts(open_client, made, settings, capsys, monkeypatch):
    async def broken(path, *, password, on_progress):
        text = path.read_text()
        raise RuntimeError("parser fault") from ValueError(len(text))

    configure_logging(settings.model_copy(update={"log_level": "debug", "log_format": "json"}))
    async with open_client() as client:
        body = await made(client, f"{SECRET}. ".encode() * 20, f"{SECRET}.txt", title=SECRET, password=SECRET)
        await client.get(f"/v1/documents/{body['id']}/pages/1", params={"q": SECRET})
        session = (await client.post("/v1/sessions", json={"document_ids": [body["id"]]})).json()["id"]
        await client.post(f"/v1/sessions/{session}/questions", json={"question": f"Where is {SECRET}?"})
        await client.delete(f"/v1/documents/{body['id']}")
    async with open_client(read=broken) as client:
        assert (await made(client, SECRET.encode()))["status"] == "failed"
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {"request", "document done", "document removed", "document failed"} <= {x["event"] for x in lines}
    assert all(x["request_id"].startswith("req_") for x in lines if x["event"] == "request")
    assert "Zanzibar" not in json.dumps(lines)


@pytest.mark.anyio
async def test_an_error_of_the_database_carries_no_text(tmp_path):
    db = Database(f"sqlite+aiosqlite:///{tmp_path / 'empty.sqlite3'}")
    async with db.reading() as uow:
        with pytest.raises(Exception, match="no such table") as failure:
            await uow.documents.get(SECRET)
    await db.close()
    assert SECRET not in str(failure.value)


@pytest.mark.anyio
async def test_options_name_every_method_of_the_address(client):
    for path, methods in (
        ("/v1/documents", "GET, OPTIONS, POST"),
        ("/v1/documents/doc_x", "DELETE, GET, OPTIONS, PATCH"),
        ("/v1/sessions/ses_x/shares", "GET, OPTIONS, POST"),
    ):
        response = await client.options(path)
        assert (response.status_code, response.headers["allow"]) == (204, methods)
        assert set((await client.request("TRACE", path)).headers["allow"].split(", ")) == set(methods.split(", "))


@pytest.mark.anyio
async def test_the_schema_tells_the_headers_the_limits_and_what_is_no_json(client):
    schema = (await client.get("/schema/openapi.json")).json()
    paths, bodies = schema["paths"], schema["components"]["schemas"]
    for path, operations in paths.items():
        for operation in operations.values():
            responses = operation["responses"]
            assert ("401" in responses) is not path.startswith("/health")
            assert all("X-Request-ID" in response["headers"] for response in responses.values())
            assert all("Retry-After" in responses[status]["headers"] for status in {"429", "503"} & set(responses))
            assert {"413", "415"} <= set(responses) or "requestBody" not in operation
    asked = paths["/v1/sessions/{session_id}/questions"]["post"]["responses"]["200"]
    assert set(asked["content"]) == {"application/json", "text/event-stream"}
    assert "Location" in asked["headers"]
    file = paths["/v1/documents/{document_id}/file"]["get"]
    assert {"Range", "If-Range"} <= {parameter["name"] for parameter in file["parameters"]}
    assert {"200", "206", "416"} <= set(file["responses"])
    assert "Content-Range" in file["responses"]["206"]["headers"]
    question = bodies["QuestionBody"]
    assert question["additionalProperties"] is False
    assert question["properties"]["top_k"]["maximum"] == 1000
    assert paths["/v1/sessions/{session_id}/fork"]["post"]["requestBody"]["required"] is False
