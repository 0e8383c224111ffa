"""SIGTERM with open streams: the end comes soon, every client is told, what was finished is kept."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.builds import computed_until
from tests.e2e.server import Server, files_below
from tests.e2e.sse import Event, events_of, text_of

DOCUMENT = b"The ferry to Inchcolm leaves at 9.40 from the east pier.\n\n" * 8
N_STREAMS = 4


@pytest.fixture(scope="module")
def server(serve_all) -> Server:
    """Tests stop it, and leave it running."""
    return serve_all(fake={"fake_script": [97] * 1000, "fake_step_s": 0.05, "fake_layer_s": 0.05})


def read_all(server: Server, session_id: str, started: threading.Barrier) -> list[Event]:
    with server.streaming(session_id, max_tokens=900) as response:
        arriving = events_of(response)
        events = [next(arriving)]
        started.wait(60)
        return events + list(arriving)


def test_sigterm_with_open_streams_ends_within_ten_seconds_and_keeps_everything(server: Server):
    document = server.ready(DOCUMENT)
    sessions = [server.session(document["id"]) for _ in range(N_STREAMS)]
    finished = server.ask(sessions[0], max_tokens=6)
    started = threading.Barrier(N_STREAMS + 1)
    with ThreadPoolExecutor(N_STREAMS) as pool:
        streams = [pool.submit(read_all, server, session_id, started) for session_id in sessions]
        started.wait(60)
        seconds = server.stop()
    assert seconds < 10
    for stream in streams:
        events = stream.result()
        last = events[-1]
        assert (last.name, last.data["status"]) == ("error", 503) or last.name == "done", last
    server.start()
    for session_id, stream in zip(sessions, streams, strict=True):
        turn = server.turns(session_id)[-1]
        assert turn["status"] in ("cancelled", "failed"), turn
        kept = turn["answer"]["answer"] if turn["answer"] else ""
        assert turn["status"] == "failed" or kept.startswith(text_of(stream.result()))
    assert server.turns(sessions[0])[0]["answer"] == finished
    follow_up = server.ask(sessions[0], max_tokens=6)
    assert follow_up["answer"] == finished["answer"]
    assert (follow_up["cache"]["source"], follow_up["cache"]["miss_reason"]) == ("disk", None)
    assert follow_up["usage"]["reused_tokens"] > document["token_count"]
    assert server.engine_stat("document_prefill_tokens_total") == 0
    for name in ("building", "trash", "locks", "quarantine"):
        assert files_below(server.store / name) == []


def test_sigterm_in_a_prefill_keeps_the_journal(server: Server):
    long = b"".join(b"Plot %d is let for %d pounds a year.\n\n" % (i, 17 * i) for i in range(150))
    document_id = server.upload(long)["id"]
    computed_until(server, document_id, 0.25)
    assert server.stop() < 10
    server.start()
    document = server.until_ended(document_id)
    assert document["status"] == "ready"
    assert document["snapshot"]["prefilled_tokens"] <= document["token_count"] - 1400
    assert server.ask(server.session(document_id), max_tokens=1)["answer"] == "a"
