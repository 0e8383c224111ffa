"""The engine's process or the server is killed: nothing durable is lost, and what was open says so.

Builds that are killed are in `test_contract`.
"""

import pytest

from tests.e2e.server import Server
from tests.e2e.sse import events_of, text_of

DOCUMENT = b"The ferry to Inchcolm leaves at 9.40 from the east pier.\n\n" * 6


@pytest.fixture(scope="module")
def server(serve_all) -> Server:
    """Tests kill it, or its engine, and leave it running."""
    return serve_all(fake={"fake_script": [97] * 600, "fake_step_s": 0.03})


def test_an_engine_killed_in_mid_answer_is_a_retryable_error_and_the_next_question_is_answered(server: Server):
    session_id = server.session(server.ready(DOCUMENT)["id"])
    first = server.ask(session_id, max_tokens=5)
    with server.streaming(session_id, max_tokens=500) as response:
        arriving = events_of(response)
        seen = [next(arriving) for _ in range(3)]
        server.kill_engine()
        seen += arriving
    error = seen[-1]
    assert error.name == "error"
    assert (error.data["status"], error.data["retryable"]) == (503, True)
    assert error.data["retry_after_s"] > 0
    server.until_engine_is_back()
    again = server.ask(session_id, max_tokens=5)
    assert again["answer"] == first["answer"]
    assert again["cache"]["source"] == "disk"
    assert again["usage"]["reused_tokens"] > again["usage"]["document_tokens"]
    turns = server.turns(session_id)
    assert [turn["status"] for turn in turns] == ["done", "failed", "done"]
    assert turns[1]["error"]["code"] == "engine_lost"
    assert turns[1]["answer"] is None
    assert text_of(seen)


def test_questions_while_the_engine_is_away_are_told_when_to_come_back(server: Server):
    session_id = server.session(server.ready(DOCUMENT)["id"])
    server.kill_engine()
    refused = server.question(session_id)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["content-type"].startswith("application/problem+json")
    assert server.get("/health/live").status_code == 200
    server.until_engine_is_back()
    assert server.ask(session_id, max_tokens=5)["answer"] == "aaaaa"


def test_a_server_killed_with_running_answers_keeps_what_was_finished(server: Server):
    session_id = server.session(server.ready(DOCUMENT)["id"])
    first = server.ask(session_id, max_tokens=5)
    with server.streaming(session_id, max_tokens=500) as response:
        next(events_of(response))
        server.kill()
    server.start()
    done, cut = server.turns(session_id)
    assert done["answer"] == first
    assert (cut["status"], cut["error"]["code"]) == ("failed", "interrupted")
    again = server.ask(session_id, max_tokens=5)
    assert (again["answer"], again["cache"]["source"]) == (first["answer"], "disk")
    assert again["cache"]["miss_reason"] is None
    assert server.engine_stat("document_prefill_tokens_total") == 0
