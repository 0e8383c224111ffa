"""The API over llama.cpp: streams, users side by side, an engine that dies, and what this engine does not do."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.damaged import story
from tests.e2e.server import Server
from tests.e2e.sse import events_of, last_of, text_of

pytestmark = pytest.mark.timeout(600)
QUESTION = "Who keeps the lighthouse?"
COUNT = "How many steps did visitor 7 climb?"


@pytest.fixture(scope="module")
def server(serve_all, of_llama: dict[str, Any]) -> Server:
    return serve_all(**of_llama, kv_type="k8v8")


@pytest.fixture(scope="module")
def documents(server: Server) -> list[dict[str, Any]]:
    return [server.ready(story(n, 40).encode()) for n in range(2)]


def test_the_joined_stream_is_the_answer_and_the_stored_turn(server: Server, documents):
    session_id = server.session(documents[0]["id"])
    with server.streaming(session_id, QUESTION) as response:
        events = list(events_of(response))
    done = last_of(events, "done")
    assert text_of(events) == done["answer"] == server.turns(session_id)[-1]["answer"]["answer"]
    assert "Ada Brun" in done["answer"]


def test_a_broken_stream_is_taken_up_again(server: Server, documents):
    session_id = server.session(documents[1]["id"])
    with server.streaming(session_id, QUESTION) as response:
        location, arriving = response.headers["location"], events_of(response)
        seen = list(itertools.islice(arriving, 3))
    with server.client.stream("GET", location, headers={"Last-Event-ID": seen[-1].id}) as response:
        seen += events_of(response)
    assert text_of(seen) == last_of(seen, "done")["answer"]
    assert "Tom Quill" in text_of(seen)


def test_users_at_once_get_the_answers_that_each_gets_alone(server: Server, documents):
    """Two on one document, and one on another."""
    asked = [(documents[0], QUESTION), (documents[0], COUNT), (documents[1], QUESTION)]
    alone = [server.ask(server.session(document["id"]), text)["answer"] for document, text in asked]
    sessions = [server.session(document["id"]) for document, _ in asked]
    computed = server.engine_stat("document_prefill_tokens_total")
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(
            pool.map(lambda pair: server.ask(pair[0], pair[1][1])["answer"], zip(sessions, asked, strict=True))
        )
    assert together == alone
    assert server.engine_stat("document_prefill_tokens_total") == computed


def test_the_same_seed_gives_the_same_answer(server: Server, documents):
    def ask(seed: int) -> str:
        session_id = server.session(documents[0]["id"])
        return server.ask(session_id, "Tell me about it.", temperature=1.5, seed=seed, max_tokens=24)["answer"]

    assert ask(7) == ask(7)
    assert len({ask(seed) for seed in range(4)}) > 1


def test_an_engine_killed_in_mid_answer_loses_nothing_that_was_stored(server: Server, documents):
    session_id = server.session(documents[0]["id"])
    first = server.ask(session_id, QUESTION)
    with server.streaming(session_id, "Repeat the document.", max_tokens=400) as response:
        arriving = events_of(response)
        seen = list(itertools.islice(arriving, 3))
        server.kill_engine()
        seen += arriving
    assert (seen[-1].name, seen[-1].data["status"], seen[-1].data["retryable"]) == ("error", 503, True)
    server.until_engine_is_back()
    again = server.ask(session_id, QUESTION)
    assert "Ada Brun" in first["answer"]
    assert again["cache"]["source"] == "disk"
    assert again["usage"]["reused_tokens"] > again["usage"]["document_tokens"]
    assert server.engine_stat("document_prefill_tokens_total") == 0


def test_what_llama_cpp_does_not_do_is_refused_with_the_reason(server: Server, documents):
    files, fields = {"file": ("a.txt", b"The mill stands by the river.")}, {"retention": "balanced"}
    windowed = server.request("POST", "/v1/documents", files=files, data=fields)
    several = server.request("POST", "/v1/sessions", json={"document_ids": [each["id"] for each in documents]})
    for refused in (windowed, several):
        assert refused.status_code == 422
        assert refused.json()["error"]["code"] == "no_index_heads"
        assert "llama.cpp does not give" in refused.json()["detail"]
    answer = server.ask(server.session(documents[0]["id"]), QUESTION)
    assert [citation["attention"] for citation in answer["citations"]] == [None]


def test_a_missing_gpu_is_told_before_anything_is_loaded(server: Server, of_llama: dict[str, Any], tmp_path):
    refused = Server(tmp_path / "data", **of_llama, offload="all").run("serve", "--port", "0")
    assert refused.returncode != 0
    assert "PREREAD_OFFLOAD=all" in refused.stderr + refused.stdout
