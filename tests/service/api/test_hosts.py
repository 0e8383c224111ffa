"""Web pages cannot use the browser of this machine to reach the server: names it is not known by, other sites."""

import pytest

from service.api.hosts import Guarded
from service.settings import Settings

OWN = ["localhost", "localhost:8420", "LOCALHOST.", "127.0.0.1", "127.0.0.1:8420", "127.9.9.9:1", "[::1]:8420", ""]
FOREIGN = [
    "evil.example",
    "evil.example:8420",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "10.0.0.1",
    "@",
    "[",
]


async def status(settings: Settings, host: str, origin: str | None = None, *more: tuple[bytes, bytes]) -> int:
    """What a request with these headers comes to."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    sent = []

    async def send(message):
        sent.append(message)

    headers = [(b"host", host.encode()), *([(b"origin", origin.encode())] if origin is not None else []), *more]
    await Guarded(app, settings)({"type": "http", "headers": headers}, None, send)  # type: ignore[arg-type]
    return sent[0]["status"]


@pytest.mark.anyio
async def test_a_loopback_server_answers_to_names_of_this_machine_only():
    for host in OWN:
        assert await status(Settings(), host) == 204, host
    for host in FOREIGN:
        assert await status(Settings(), host) == 403, host
    assert await status(Settings(), "localhost", None, (b"host", b"evil.example")) == 403


@pytest.mark.anyio
async def test_names_can_be_added_and_are_then_the_only_ones():
    for settings in (
        Settings(allowed_hosts="A.example, b.example"),
        Settings(allowed_hosts="a.example", host="0.0.0.0"),
    ):
        assert await status(settings, "a.example:80") == 204
        assert await status(settings, "127.0.0.1") == 204
        assert await status(settings, "evil.example") == 403
        assert await status(settings, "127.0.0.1", "https://a.example") == 204
    assert await status(Settings(allowed_hosts="*"), "evil.example", "null") == 204
    assert await status(Settings(host="0.0.0.0"), "any.example") == 204


@pytest.mark.anyio
@pytest.mark.parametrize("listening", ["127.0.0.1", "0.0.0.0"])
async def test_pages_of_other_sites_are_refused(listening):
    settings = Settings(host=listening)
    assert await status(settings, "127.0.0.1:8420", "http://127.0.0.1:8420") == 204
    for origin in ("null", "", "http://evil.example", "http://127.0.0.1:8888", "http://localhost:8420", "file://"):
        assert await status(settings, "127.0.0.1:8420", origin) == 403, origin


@pytest.mark.anyio
async def test_a_refusal_is_a_problem_and_nothing_was_done(client):
    files = {"file": ("a.txt", b"text")}
    refused = await client.post("/v1/documents", files=files, headers={"origin": "http://evil.example"})
    assert (refused.status_code, refused.headers["content-type"]) == (403, "application/problem+json")
    assert refused.json()["error"]["code"] == "origin_not_allowed"
    assert refused.json()["instance"].endswith(refused.headers["x-request-id"])
    rebound = await client.get("/v1/documents", headers={"host": "evil.example"})
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "host_not_allowed")
    assert (await client.get("/v1/documents")).json()["data"] == []
