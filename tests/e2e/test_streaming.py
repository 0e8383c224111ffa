"""Streams over a real socket: whole characters, whatever the tokens; nothing lost or doubled by a break."""

import itertools
import time
from pathlib import Path

import pytest

from service.engine.tokenizer import Tokenizer
from tests.e2e.server import Server, until
from tests.e2e.sse import Event, events_of, last_of, text_of

TEXT = "答案：合同于三月三日到期🙂👩\u200d👩\u200d👧 e\u0301é नमस्ते."
COUNTING = " ".join(map(str, range(100)))
"""An answer in which a lost or doubled piece shows."""
END = 256
"""Ends an answer of the fake engine where a token is a byte."""
DOCUMENT = b"The lease of Mill House ends on 3 March 2041.\n\n" * 8


@pytest.fixture(scope="module")
def by_tokens(serve_all, demo_model: Path):
    """A server whose answers are TEXT in the demo model's tokens."""
    script = [*Tokenizer.load(demo_model).encode_plain(TEXT), 2]
    return serve_all(fake={"fake_script": script, "model_dir": str(demo_model)})


@pytest.fixture(scope="module")
def counting(serve_all):
    """A server that counts to 99 in two seconds and more."""
    return serve_all(fake={"fake_script": [*COUNTING.encode(), END], "fake_step_s": 0.01}, disconnect_grace_s=60)


def whole(server: Server, session_id: str, **options) -> list[Event]:
    with server.streaming(session_id, **options) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events_of(response))


@pytest.mark.model
def test_a_character_cut_by_max_tokens_is_left_out(by_tokens: Server, demo_model: Path):
    tokenizer = Tokenizer.load(demo_model)
    pieces = [tokenizer.token_bytes(token) for token in tokenizer.encode_plain(TEXT)]
    assert b"".join(pieces).decode() == TEXT
    document_id = by_tokens.ready(DOCUMENT)["id"]
    for n in range(1, len(pieces) + 1):
        events = whole(by_tokens, by_tokens.session(document_id), max_tokens=n)
        done, joined = last_of(events, "done"), text_of(events)
        assert joined == b"".join(pieces[:n]).decode(errors="ignore")
        assert joined == done["answer"]
        assert "\ufffd" not in joined
        assert (done["finish_reason"], done["usage"]["completion_tokens"]) == ("length", n)


@pytest.mark.model
def test_the_joined_stream_is_the_answer_and_the_stored_turn(by_tokens):
    session_id = by_tokens.session(by_tokens.ready(DOCUMENT)["id"])
    events = whole(by_tokens, session_id)
    done = last_of(events, "done")
    assert text_of(events) == done["answer"] == by_tokens.turns(session_id)[-1]["answer"]["answer"] == TEXT
    assert done["finish_reason"] == "stop"


def test_a_broken_stream_is_taken_up_again_from_its_last_event(counting):
    session_id = counting.session(counting.ready(DOCUMENT)["id"])
    with counting.streaming(session_id) as response:
        location, arriving = response.headers["location"], events_of(response)
        seen = [next(arriving) for _ in range(3)]
    for n in (3, 3, 1000):
        with counting.client.stream("GET", location, headers={"Last-Event-ID": seen[-1].id}) as response:
            seen += itertools.islice(events_of(response), n)
    assert text_of(seen) == COUNTING == last_of(seen, "done")["answer"]
    ids = [int(event.id) for event in seen if event.id]
    assert ids == sorted(set(ids))


def test_an_answer_that_is_over_is_streamed_again_from_any_event(counting):
    session_id = counting.session(counting.ready(DOCUMENT)["id"])
    with counting.streaming(session_id, max_tokens=40) as response:
        location, events = response.headers["location"], list(events_of(response))
    for at in (0, len(events) // 2, len(events) - 2):
        with counting.client.stream("GET", location, headers={"Last-Event-ID": events[at].id}) as response:
            again = list(events_of(response))
        assert text_of(events[: at + 1]) + text_of(again) == last_of(again, "done")["answer"] == COUNTING[:40]
    assert counting.get(location, headers={"Last-Event-ID": events[-1].id}).status_code == 204


def test_an_answer_goes_on_without_a_reader_for_the_grace_time(counting):
    session_id = counting.session(counting.ready(DOCUMENT)["id"])
    with counting.streaming(session_id) as response:
        next(events_of(response))
    turn = until(lambda: (last := counting.turns(session_id)[-1])["status"] != "running" and last, "it goes on")
    assert (turn["status"], turn["answer"]["answer"]) == ("done", COUNTING)


def test_a_second_question_at_once_on_a_session_is_refused(counting):
    session_id = counting.session(counting.ready(DOCUMENT)["id"])
    with counting.streaming(session_id) as response:
        arriving = events_of(response)
        events = [next(arriving)]
        second = counting.question(session_id)
        assert (second.status_code, second.json()["error"]["code"]) == (409, "session_busy")
        events += arriving
    assert last_of(events, "done")["answer"] == COUNTING
    assert counting.ask(session_id, max_tokens=2)["finish_reason"] == "length"
    assert len(counting.turns(session_id)) == 2


@pytest.mark.alone
def test_once_the_grace_is_over_decoding_stops_within_two_steps(serve):
    server = serve(fake={"fake_script": [97] * 500, "fake_step_s": 0.5}, disconnect_grace_s=0)
    session_id = server.session(server.ready(DOCUMENT)["id"])
    with server.streaming(session_id, max_tokens=400) as response:
        arriving = events_of(response)
        seen = [next(arriving) for _ in range(3)]
        steps = server.engine_stat("steps_total")
    time.sleep(2.5)
    assert server.engine_stat("steps_total") <= steps + 2
    assert server.engine_stat("running") == 0
    assert server.engine_stat("document_references") == 0
    turn = server.turns(session_id)[-1]
    assert turn["status"] == "cancelled"
    assert turn["answer"]["answer"].startswith(text_of(seen))
    assert server.ask(session_id, max_tokens=2)["finish_reason"] == "length"
