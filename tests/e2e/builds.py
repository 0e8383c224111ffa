"""Builds that are killed on the way."""

from typing import Any

from tests.e2e.server import Server, until

BLOCK_TOKENS = 256
BEFORE_THE_END = frozenset({"queued", "parsing", "prefilling"})


def build_killed_twice(server: Server, content: bytes, name: str = "document.txt") -> dict[str, Any]:
    """Upload a document, kill the engine at about 45 % of its prefill and the server at about 55 %; the finished
    document. At most three blocks are computed again after each."""
    document_id = server.upload(content, name)["id"]
    computed = computed_until(server, document_id, 0.45)
    server.kill_engine()
    server.until_engine_is_back()
    computed += computed_until(server, document_id, 0.55)
    server.kill()
    server.start()
    document = server.until_ended(document_id)
    assert document["status"] == "ready", document
    last = server.engine_stat("document_prefill_tokens_total")
    n_tokens = document["token_count"]
    assert document["snapshot"]["prefilled_tokens"] == last < n_tokens * 0.45 + 3 * BLOCK_TOKENS
    assert computed + last < n_tokens + 2 * 4 * BLOCK_TOKENS
    return document


def computed_until(server: Server, document_id: str, share: float) -> float:
    """The tokens that this engine has computed when that share of a document has been read."""

    def far_enough() -> bool:
        document = server.document(document_id)
        assert document["status"] in BEFORE_THE_END, document
        progress = document["progress"]
        return progress["unit"] == "tokens" and progress["done"] >= share * progress["total"]

    until(far_enough, "the prefill does not get on", 300)
    return server.engine_stat("document_prefill_tokens_total")
