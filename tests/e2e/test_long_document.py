"""Real text several times as long as the context: what is asked for is found, in the same memory."""

from pathlib import Path
from typing import Any

import pytest

from service.engine.index_heads import load_index_heads
from tests.e2e.long_text import with_facts
from tests.e2e.server import Server

pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.timeout(1800)]
CONTEXT = 4096
"""Half of what the demo model has: what is longer is read and kept in the same way, and sooner."""
CHARS_PER_TOKEN = 4.4
FACTS = (
    "The keeper of the Rosehill pump is Edda Malkin, and its access code is KV-417.",
    "The warden of the salt warehouse is Tomas Brill, and his room has the number 263.",
    "The treasurer of the kite school is Ingrid Solberg, and she is paid 2,450 crowns a month.",
)
FIRST, FOLLOW_UP, LAST = (
    "Who is the keeper of the Rosehill pump?",
    "What is the access code of the Rosehill pump?",
    "Who is the treasurer of the kite school?",
)


def text(n_tokens: int) -> bytes:
    return with_facts(round(n_tokens * CHARS_PER_TOKEN), FACTS).encode()


def pages_with(server: Server, document: dict[str, Any], words: str) -> set[int]:
    pages = range(1, document["page_count"] + 1)
    path = f"/v1/documents/{document['id']}/pages"
    return {number for number in pages if words in server.get(f"{path}/{number}").json()["text"]}


def fetched(answer: dict[str, Any]) -> set[int]:
    parts = [part for part in answer["provenance"] if part["mode"] == "fetched"]
    return {page for part in parts for page in range(part["first_page"], part["last_page"] + 1)}


def test_facts_of_a_document_longer_than_the_context_are_found_also_after_a_restart(serve, demo_model: Path):
    assert load_index_heads(demo_model), f"{demo_model} has no index heads: run `make model` again"
    server: Server = serve(model=demo_model, max_context=CONTEXT)
    document = server.until_ended(server.upload(text(7_000), "library.md")["id"], 1500)
    assert document["status"] == "ready", document
    assert 1.5 * CONTEXT < document["token_count"] < 7_700
    snapshot = document["snapshot"]
    assert (snapshot["retention"]["preset"], snapshot["resident_tokens"]) == ("small", 272)

    session = server.session(document["id"])
    first, follow_up = server.ask(session, FIRST, max_tokens=40), server.ask(session, FOLLOW_UP, max_tokens=40)
    last = server.ask(server.session(document["id"]), LAST, max_tokens=40)
    for answer, words, fact in ((first, "Edda Malkin", 0), (follow_up, "KV-417", 0), (last, "Ingrid Solberg", 2)):
        assert words in answer["answer"]
        assert pages_with(server, document, FACTS[fact]) <= fetched(answer)
        assert answer["notice"] is None
        assert answer["usage"]["reused_tokens"] >= document["token_count"]

    server.stop()
    server.start()
    again = server.ask(server.session(document["id"]), FIRST, max_tokens=40)
    assert (again["answer"], again["provenance"]) == (first["answer"], first["provenance"])
    assert (again["cache"]["source"], again["cache"]["miss_reason"]) == ("disk", None)
    assert server.engine_stat("document_prefill_tokens_total") == 0


def test_twice_the_document_takes_the_same_memory(serve, demo_model: Path):
    """In the demo model's tokens, with a fake engine: how much is kept is no matter of what the model computes."""
    server: Server = serve(fake={"model_dir": str(demo_model), "max_context": 4096, "fake_chunk_tokens": 512})
    documents = [server.ready(text(n_tokens), "library.md") for n_tokens in (10_000, 20_000)]
    assert documents[1]["token_count"] > 1.9 * documents[0]["token_count"] > 17_000
    for name in ("resident_tokens", "resident_nbytes"):
        assert documents[0]["snapshot"][name] == documents[1]["snapshot"][name]
