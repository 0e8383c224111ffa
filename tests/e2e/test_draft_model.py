"""A draft model through a server: it reads documents beside the model, guesses, and goes with them."""

from pathlib import Path

import pytest

from benchmarks.gpu_models import tiny_model
from tests.e2e.server import Server, until
from tests.service.engine.draft_pair import twin

TEXT = " ".join(f"Clause {i}: the tenant pays {37 * i} pounds in advance." for i in range(40)).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    models: Path = tmp_path_factory.mktemp("models")
    model = tiny_model(models)
    settings = {"model": model, "draft_model": twin(model, models / "twin"), "kv_type": "fp16", "threads": 1}
    return Server(tmp_path_factory.mktemp("data") / "preread", compute_dtype="float32", **settings)


def test_it_guesses_and_its_snapshots_live_and_go_with_the_documents(server: Server) -> None:
    with server:
        assert server.get("/health/ready").json()["draft_model"] == "twin"
        document = server.ready(TEXT)
        n_tokens = document["token_count"]
        until(
            lambda: server.engine_stat("draft_document_prefill_tokens_total") == n_tokens,
            "the draft model reads nothing",
        )
        session = server.session(document["id"])
        first = server.ask(session, max_tokens=24)
        until(lambda: _guessed(server, session), "the draft model guesses nothing")
        assert server.engine_stat("draft_misses_total") == 0
        until(lambda: _guessed_again(server, document["id"], first["answer"]), "it guesses nothing of another session")
        assert any(server.store.rglob(document["id"]))
        assert server.request("DELETE", f"/v1/documents/{document['id']}").status_code in (200, 204)
        until(lambda: not any(server.store.rglob(document["id"])), "something of the document is left")
        assert server.engine_stat("draft_documents") == 0


def _guessed(server: Server, session: str) -> bool:
    """After one more answer: the draft model's document comes into memory beside answers."""
    if not server.engine_stat("draft_guessed_tokens_total"):
        server.ask(session, max_tokens=24)
    return server.engine_stat("draft_guessed_tokens_total") > 0


def _guessed_again(server: Server, document_id: str, expected: str) -> bool:
    """Whether the draft model guesses in an answer of a new session, which is to be the expected one. On a busy machine
    an answer may be over before it is followed."""
    n_guessed = server.engine_stat("draft_guessed_tokens_total")
    assert server.ask(server.session(document_id), max_tokens=24)["answer"] == expected
    return server.engine_stat("draft_guessed_tokens_total") > n_guessed
