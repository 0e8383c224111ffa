"""Every failure has the same body, with the words an OpenAI client looks for."""

import msgspec
import pytest
from litestar import Litestar, get, post
from litestar.params import JSONBody
from litestar.testing import AsyncTestClient

from service import errors
from service.api.problems import on_error, problem_of
from service.api.requests import ApiRequest


class Body(msgspec.Struct, forbid_unknown_fields=True):
    count: int


@post("/body")
async def takes_body(data: JSONBody[Body]) -> int:
    return data.count


@post("/optional")
async def may_take_body(data: JSONBody[Body | None] = None) -> bool:
    return data is None


@get("/busy")
async def busy() -> None:
    raise errors.Busy("full", retry_after_s=7)


@get("/boom")
async def boom() -> None:
    raise RuntimeError("secret text")


@pytest.fixture
async def client(anyio_backend):
    app = Litestar(
        [takes_body, may_take_body, busy, boom],
        exception_handlers={Exception: on_error},
        request_class=ApiRequest,
        request_max_body_size=200_000,
        logging_config=None,
    )
    async with AsyncTestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.Forbidden("x"), 403, "forbidden"),
        (errors.NotFound("x"), 404, "not_found"),
        (errors.Invalid("x", param="question"), 422, "invalid"),
        (errors.TooLong("x"), 422, "context_length_exceeded"),
        (errors.Conflict("x", code="session_busy"), 409, "session_busy"),
        (errors.Gone("x"), 410, "gone"),
        (errors.TooLarge("x"), 413, "too_large"),
        (errors.Unsupported("x"), 415, "unsupported_media_type"),
        (errors.Busy("x"), 429, "queue_full"),
        (errors.Unavailable("x"), 503, "engine_unavailable"),
        (errors.StorageFull("x"), 507, "storage_full"),
        (errors.ServiceError("x"), 500, "error"),
    ],
)
def test_each_service_error_has_its_status(error, status, code):
    problem = problem_of(error, "r1")
    assert (problem.status, problem.error.code, problem.detail) == (status, code, "x")
    assert problem.type == f"urn:preread:problem:{code}"
    assert problem.instance == "urn:preread:request:r1"
    assert problem.error.param == error.param


@pytest.mark.anyio
async def test_unknown_route_method_body_and_fault(client):
    missing = await client.get("/nowhere")
    assert (missing.status_code, missing.headers["content-type"]) == (404, "application/problem+json")
    assert "/schema" in missing.json()["detail"]
    wrong = await client.delete("/busy")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "GET" in wrong.headers["allow"]
    assert "`Allow`" in wrong.json()["detail"]
    malformed = await client.post("/body", content=b"{", headers={"content-type": "application/json"})
    assert (malformed.status_code, malformed.json()["status"]) == (400, 400)
    unknown = await client.post("/body", json={"count": 1, "colour": 2})
    assert unknown.status_code in {400, 422}
    assert "colour" in unknown.json()["detail"]
    fault = await client.get("/boom")
    assert fault.status_code == 500
    assert "secret" not in fault.text


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "kind", "status", "said"),
    [
        (b"", "application/json", 400, "no body"),
        (b"{", "application/json", 400, ""),
        (b"[" * 100_000, "application/json", 400, "nested too deeply"),
        (b'{"a":' * 30_000, "application/json", 400, "nested too deeply"),
        (b'{"count": 1}', "text/plain", 415, "application/json"),
        (b"count=1", "application/x-www-form-urlencoded", 415, "application/json"),
        (b" " * 200_001, "application/json", 413, "200,000 bytes"),
        (b'{"count": 1}', "Application/JSON; charset=utf-8", 201, ""),
    ],
)
async def test_bodies_that_are_not_json_are_told_why(client, body, kind, status, said):
    response = await client.post("/body", content=body, headers={"content-type": kind})
    assert response.status_code == status
    assert said in response.text


@pytest.mark.anyio
async def test_no_content_type_is_json_and_an_optional_body_may_be_left_out(client):
    assert (await client.post("/body", content=b'{"count": 1}')).status_code == 201
    assert (await client.post("/optional")).json() is True


@pytest.mark.anyio
async def test_busy_says_when_to_come_back(client):
    response = await client.get("/busy")
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert response.json()["error"]["type"] == "server_error"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("count", "status"), [("1", 201), ("1.0", 201), ("1.5", 422), ("true", 422), ('"1"', 422), ("null", 422)]
)
async def test_json_is_taken_as_it_is_meant(client, count, status):
    response = await client.post("/body", content=f'{{"count": {count}}}', headers={"content-type": "application/json"})
    assert response.status_code == status
    if count in ("true", '"1"'):
        assert response.json()["error"]["param"] == "count"
        assert "Expected `int`" in response.json()["detail"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "param"), [({"count": 1, "counts": 2}, "counts"), ({}, "count"), ([], None), ({"count": "x"}, "count")]
)
async def test_a_wrong_field_is_named_and_not_the_body(client, body, param):
    problem = (await client.post("/body", json=body)).json()
    assert problem["error"]["param"] == param
    assert [each["param"] for each in problem["errors"]] == [param or ""]
    assert "data" not in problem["detail"]
