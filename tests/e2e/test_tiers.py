"""A server whose store is lost: documents and sessions come back from Redis and S3, and deletion reaches both."""

import shutil
from collections.abc import Callable

import pytest

from tests.cache_store.tiers.servers import RedisServer, S3Server
from tests.e2e.server import Server, until

ANSWER = [*b"All is well.", 256]
DOCUMENT = b"The ferry to Inchcolm leaves at 9.40 from the east pier.\n\n" * 6
EVERYWHERE = dict.fromkeys(("disk", "redis", "object"), "ready")


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Server], redis: RedisServer, s3: S3Server) -> Server:
    return serve_all(fake={"fake_script": ANSWER}, redis_url=redis.url, object_url=s3.url, sweep_interval_s=0.3)


def n_keys(redis: RedisServer) -> int:
    client = redis.client()
    try:
        return sum(1 for _ in client.scan_iter("preread:kv:*"))
    finally:
        client.close()


def places(server: Server, document_id: str) -> dict[str, str]:
    return {place["tier"]: place["state"] for place in server.document(document_id)["snapshot"]["tiers"]}


def receipt(server: Server, document_id: str) -> dict[str, int]:
    """Delete a document; the objects that each tier had."""
    parts = server.request("DELETE", f"/v1/documents/{document_id}").json()["removed"]
    return {part["tier"]: part["objects"] for part in parts}


def restart_without_its_store(server: Server) -> None:
    server.stop()
    shutil.rmtree(server.store)
    server.start()


def test_a_host_is_lost_and_nothing_is_computed_again(server: Server, redis: RedisServer, s3: S3Server):
    document_id = server.ready(DOCUMENT)["id"]
    session_id = server.session(document_id)
    first = server.ask(session_id)
    until(lambda: places(server, document_id) == EVERYWHERE, "everything is sent")
    until(lambda: n_keys(redis) == 2, "the turn is sent")

    restart_without_its_store(server)
    again = server.ask(session_id)
    assert (again["answer"], again["cache"]["source"], again["cache"]["miss_reason"]) == (
        first["answer"],
        "redis",
        None,
    )
    assert again["usage"]["reused_tokens"] > again["usage"]["document_tokens"]
    assert server.engine_stat("document_prefill_tokens_total") == 0
    until(lambda: n_keys(redis) == 3, "the second turn is sent")
    until(lambda: sum(key.endswith("manifest.json") for key in s3.names()) == 3, "the second turn is in S3")

    redis.kill()
    restart_without_its_store(server)
    third = server.ask(session_id)
    assert (third["answer"], third["cache"]["source"], third["cache"]["miss_reason"]) == (
        first["answer"],
        "object",
        None,
    )
    assert server.engine_stat("document_prefill_tokens_total") == 0

    redis.start()  # empty, and asked again soon
    removed = {
        part["tier"]: part for part in server.request("DELETE", f"/v1/documents/{document_id}").json()["removed"]
    }
    assert {"disk", "redis", "object"} <= set(removed)
    assert removed["object"]["objects"] >= 6
    assert s3.names() == []
    assert server.question(session_id).status_code == 404


def test_what_a_tier_missed_of_a_deletion_is_done_later(server: Server, redis: RedisServer):
    document_id = server.ready(DOCUMENT)["id"]
    until(lambda: places(server, document_id) == EVERYWHERE, "everything is sent")
    redis.freeze()
    removed = receipt(server, document_id)
    assert (removed["redis"], removed["object"]) == (0, 2)
    assert server.get(f"/v1/documents/{document_id}").status_code == 404
    redis.thaw()
    until(lambda: n_keys(redis) == 0, "Redis has let go of it")
