"""Connections that are lost: what is sent again, and streams in which nothing is lost or doubled."""

import json
import threading

import httpx
import pytest

from service.client import (
    AsyncClient,
    Client,
    ConnectionFailed,
    NotFound,
    RateLimited,
    ServerFailed,
    StreamLost,
    TimedOut,
    Token,
    Unavailable,
    UnexpectedResponse,
)
from service.client import attempts as attempts_module
from tests.chaos.wire import Wire
from tests.e2e.server import until

ANSWER = "Zwei Männer 🙂 zahlen\u2028alles."
PIECES = ["Zwei ", "Männer 🙂 ", "zahlen\u2028", "alles."]


@pytest.fixture
def wire(live):
    """Stands before the server, and cuts."""
    wire = Wire(int(live.url.rpartition(":")[2]))
    yield wire
    wire.close()


@pytest.fixture
def at_once(monkeypatch):
    """Nothing is waited for."""
    monkeypatch.setattr(attempts_module, "_FIRST_WAIT_S", 0.0)


def cut(wire, away_s=0.2):
    """Every connection; the server is away for a while."""
    wire.set("refuse")
    threading.Timer(away_s, wire.set, [""]).start()


def heal_after_a_fault(wire):
    until(lambda: wire.n_faults, "nothing was cut", 30)
    wire.set("")


def test_a_stream_is_taken_up_again_where_it_was(wire, session, counting):
    with Client(f"http://127.0.0.1:{wire.port}", timeout=60) as client:
        seen, n_cuts = [], 0
        for event in client.stream(session.id, "Count"):
            seen.append(event)
            if isinstance(event, Token) and n_cuts < 3:
                n_cuts += 1
                cut(wire)
        assert wire.n_faults > 0 < n_cuts
        assert "".join(event.text for event in seen if isinstance(event, Token)) == counting
        assert seen[-1].answer.text == counting
        assert len(client.sessions.get(session.id).turns) == 1


@pytest.mark.anyio
async def test_so_is_one_of_asyncio(wire, session, counting):
    async with AsyncClient(f"http://127.0.0.1:{wire.port}", timeout=60) as client:
        text = ""
        async for event in client.stream(session.id, "Count"):
            if isinstance(event, Token):
                cut(wire) if not text else None
                text += event.text
        assert wire.n_faults >= 1
        assert text == counting


def test_a_server_that_stays_away_is_given_up_and_can_be_followed_later(wire, live, session, counting):
    with Client(f"http://127.0.0.1:{wire.port}", timeout=60, resume_s=0.3) as client:
        events = client.stream(session.id, "Count")
        next(events)
        wire.set("refuse")
        with pytest.raises(StreamLost) as lost:
            list(events)
        wire.set("")
        error = lost.value
        assert counting.startswith(error.text)
        rest = [
            e.text
            for e in client.follow(error.session_id, error.answer_id, error.last_event_id)
            if isinstance(e, Token)
        ]
        assert error.text + "".join(rest) == counting


def test_an_upload_whose_response_is_lost_is_sent_again(wire, client, tmp_path):
    wire.set("reset")
    healing = threading.Thread(target=heal_after_a_fault, args=(wire,))
    healing.start()
    (tmp_path / "once.txt").write_bytes(b"It is read once. " * 30)
    with Client(f"http://127.0.0.1:{wire.port}", timeout=60, retries=10) as through:
        made = through.documents.upload(tmp_path / "once.txt")
    healing.join()
    assert wire.n_faults
    assert [each.filename for each in client.documents.list()].count("once.txt") == 1
    client.documents.wait(made.id)
    client.documents.delete(made.id)


# What a server may say, without one.


def body(id, name, data):
    return f"id: {id}\r\nevent: {name}\r\ndata: {json.dumps(data, ensure_ascii=False)}\r\n\r\n".encode()


def stream_after(after=0):
    """The bytes of an answer's stream behind a character."""
    events, end = [b": still here\r\n\r\n"], 0
    for piece in PIECES:
        end += len(piece)
        if end > after:
            text = piece[-(end - after) :] if end - after < len(piece) else piece
            events.append(body(end, "token", {"text": text}))
    done = {"id": "ans_1", "answer": ANSWER, "citations": [], "of_a_newer_server": {"x": 1}}
    return b"".join([*events, body(end + 1, "citation", {"document_id": "d", "page": 1, "quote": "q", "score": 1}),
                     body(end + 2, "done", done)])  # fmt: skip


class Breaking(httpx.SyncByteStream):
    """A body that ends in an error."""

    def __init__(self, data, size=7):
        self.data, self.size = data, size

    def __iter__(self):
        for at in range(0, len(self.data), self.size):
            yield self.data[at : at + self.size]
        raise httpx.ReadError("cut")


LOCATION = {"location": "/prefix/v1/sessions/ses_1/questions/ans_1/events"}


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_wherever_a_stream_is_cut_nothing_is_lost_or_doubled(at_once, size):
    whole = stream_after()
    for n in range(size % 5, len(whole), 5):
        asked = []

        def serve(request, n=n, asked=asked):
            after = request.headers.get("last-event-id", "0")
            asked.append((request.method, request.url.path))
            rest = stream_after(int(after))
            left = Breaking(rest[:n], size) if len(asked) < 3 else httpx.ByteStream(rest)
            return httpx.Response(200, headers=LOCATION, stream=left)

        with Client("http://server/prefix", transport=httpx.MockTransport(serve)) as client:
            seen = list(client.stream("ses_1", "Who?"))
        assert "".join(event.text for event in seen if isinstance(event, Token)) == ANSWER
        assert [type(event).__name__ for event in seen[-2:]] == ["Citation", "Done"]
        assert asked[0] == ("POST", "/prefix/v1/sessions/ses_1/questions")
        assert set(asked[1:]) <= {("GET", LOCATION["location"])}


def answering(*responses):
    """A client whose server answers so, one after the other; the requests it gets."""
    left, requests = list(responses), []

    def serve(request):
        request.read()
        requests.append(request)
        response = left.pop(0)
        if isinstance(response, Exception):
            raise response
        return response

    return Client("http://server", transport=httpx.MockTransport(serve)), requests


def problem(status, code="x", **headers):
    said = {"title": "T", "status": status, "detail": "Do this.", "error": {"code": code, "param": "p"}}
    return httpx.Response(status, json=said, headers=headers)


RECEIPT = httpx.Response(200, json={"removed": []})
GONE, REFUSED = httpx.ReadError("gone"), httpx.ConnectError("refused")


def test_what_was_done_perhaps_is_not_done_again(at_once):
    client, requests = answering(GONE)
    with client, pytest.raises(ConnectionFailed, match="gone"):
        client.documents.delete("doc_1")
    assert len(requests) == 1
    client, requests = answering(problem(503))
    with client, pytest.raises(Unavailable):
        client.sessions.create("doc_1")
    assert len(requests) == 1


@pytest.mark.parametrize("first", [REFUSED, httpx.ConnectTimeout("late"), problem(429, **{"retry-after": "0"})])
def test_what_was_not_done_is_done_again(at_once, first):
    client, requests = answering(first, RECEIPT)
    with client:
        assert client.documents.delete("doc_1").removed == []
    assert len(requests) == 2


@pytest.mark.parametrize("first", [GONE, problem(503), problem(429)])
def test_a_question_is_sent_again_with_the_same_key(at_once, first):
    answer = httpx.Response(200, headers=LOCATION, content=stream_after())
    client, requests = answering(first, answer)
    with client:
        assert client.ask("ses_1", "Who?").text == ANSWER
    keys = [request.headers["idempotency-key"] for request in requests]
    assert len(set(keys)) == 1
    assert [request.content for request in requests] == [requests[0].content] * 2


def test_a_file_is_fetched_again_from_its_beginning(at_once, tmp_path):
    cut_off = httpx.Response(200, stream=Breaking(b"the whole f"))
    client, requests = answering(cut_off, problem(503), httpx.Response(200, content=b"the whole file"))
    with client:
        assert client.documents.save_file("doc_1", tmp_path / "copy").read_bytes() == b"the whole file"
    assert len(requests) == 3


@pytest.mark.anyio
async def test_so_is_one_by_asyncio(at_once, tmp_path):
    class Cut(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield b"the whole f"
            raise httpx.ReadError("cut")

    left = [httpx.Response(200, stream=Cut()), httpx.Response(200, content=b"the whole file")]
    async with AsyncClient("http://server", transport=httpx.MockTransport(lambda _: left.pop(0))) as client:
        assert (await client.documents.save_file("doc_1", tmp_path / "copy")).read_bytes() == b"the whole file"
    assert left == []


def test_who_has_to_wait_too_long_is_told(at_once):
    client, requests = answering(problem(429, "quota_documents", **{"retry-after": "3600"}))
    with client, pytest.raises(RateLimited) as refused:
        client.documents.upload(b"x")
    assert (refused.value.retry_after_s, refused.value.code, refused.value.param) == (3600.0, "quota_documents", "p")
    assert (str(refused.value), len(requests)) == ("Do this.", 1)


def test_it_ends(at_once):
    client, requests = answering(*[REFUSED] * 4)
    with client, pytest.raises(ConnectionFailed):
        client.documents.get("doc_1")
    assert len(requests) == 4


def test_a_server_that_starts_again_is_waited_for(at_once):
    whole = stream_after()
    cut_off = httpx.Response(200, headers=LOCATION, stream=Breaking(whole[: len(whole) // 2]))
    starting = problem(503, "engine_unavailable", **{"retry-after": "0"})
    client, requests = answering(
        cut_off, REFUSED, starting, starting, httpx.Response(502), httpx.Response(200, content=whole)
    )
    with client:
        assert client.ask("ses_1", "Who?").text == ANSWER
    assert len(requests) == 6


def test_a_server_that_says_nothing_is_told(at_once):
    client, requests = answering(*[httpx.ReadTimeout("late")] * 4)
    with client, pytest.raises(TimedOut, match="http://server did not answer in time"):
        client.documents.get("doc_1")
    assert len(requests) == 4


def test_an_error_of_the_answer_is_its_end_and_one_of_the_connection_is_not(at_once):
    def event(head, status):
        said = {"status": status, "detail": "Told.", "error": {"code": "x"}, "retryable": True, "retry_after_s": 0.5}
        return httpx.Response(200, headers=LOCATION, content=f"{head}event: error\ndata: {json.dumps(said)}\n\n")

    client, requests = answering(event("id: 5\n", 503))
    with client, pytest.raises(Unavailable, match="Told") as failed:
        client.ask("ses_1", "Who?")
    assert (failed.value.retry_after_s, len(requests)) == (0.5, 1)
    client, _ = answering(event("", 503), event("", 500), httpx.Response(200, content=stream_after()))
    with client:
        assert client.ask("ses_1", "Who?").text == ANSWER
    client, _ = answering(event("", 404))
    with client, pytest.raises(NotFound):
        client.ask("ses_1", "Who?")


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (httpx.Response(502, html="<h1>Bad gateway</h1>"), ServerFailed),
        (httpx.Response(404, text="nginx"), NotFound),
        (httpx.Response(200, json={"hello": 1}), UnexpectedResponse),
        (httpx.Response(200, text="<html>"), UnexpectedResponse),
        (httpx.Response(302, headers={"location": "http://elsewhere/"}), Exception),
    ],
)
def test_what_is_no_preread_server_is_told(response, kind):
    client, _ = answering(response)
    with client, pytest.raises(kind) as told:
        client.documents.get("doc_1")
    assert str(told.value)


def test_the_key_goes_to_the_server_and_nowhere_else():
    client, requests = answering(RECEIPT)
    with client:
        client.documents.delete("doc_1")
    assert "authorization" not in requests[0].headers
    sent = []

    def serve(request):
        sent.append(request)
        return httpx.Response(302, headers={"location": "http://elsewhere/"})

    with Client("http://server", "key_1.secret", transport=httpx.MockTransport(serve)) as client:
        with pytest.raises(Exception, match="302"):
            client.documents.get("doc_1")
    assert [(r.url.host, r.headers["authorization"]) for r in sent] == [("server", "Bearer key_1.secret")]
