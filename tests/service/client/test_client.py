"""The client and a real server, call by call."""

import hashlib
import io
import os
import threading

import pytest

from service.client import (
    AsyncClient,
    Citation,
    Client,
    Conflict,
    ConnectionFailed,
    DocumentFailed,
    Done,
    Invalid,
    NotFound,
    TimedOut,
    Token,
    TooLarge,
    Unavailable,
)
from service.engine.messages import Failed
from tests.service.client.conftest import PIECES, TEXT


@pytest.mark.parametrize("kind", ["path", "file", "bytes", "pipe"])
def test_uploads_are_read_in_pieces_and_told(client, tmp_path, kind):
    content = f"{kind} ".encode() * 40_000
    path = tmp_path / "Bericht März.txt"
    path.write_bytes(content)
    pipe = io.BufferedReader(Once(content))
    sources = {"path": path, "file": path.open("rb"), "bytes": content, "pipe": pipe}
    told = []
    made = client.documents.upload(sources[kind], title=kind, on_progress=lambda *sent: told.append(sent))
    sources["file"].close()
    assert (made.created, made.title, made.nbytes) == (True, kind, len(content))
    assert made.filename == ("document" if kind in ("bytes", "pipe") else path.name)
    assert len(told) > 2
    assert told[-1] == (len(content), None if kind == "pipe" else len(content))
    assert [sent for sent, _ in told] == sorted(sent for sent, _ in told)
    again = client.documents.upload(content, filename=made.filename)
    assert (again.id, again.created) == (made.id, False)
    assert client.documents.delete(made.id).removed


def test_a_file_is_sent_from_where_it_stands(client):
    file = io.BytesIO(b"not this" + TEXT + b"!")
    file.seek(8)
    made = client.documents.upload(file, filename="rest.txt")
    assert client.documents.file(made.id) == TEXT + b"!"
    client.documents.delete(made.id)


def test_waiting_tells_how_far_it_is(client, document, live):
    live.engine.chunk_delay_s = 0.02
    made = client.documents.upload(b"A sentence as good as any other. " * 60, filename="long.txt")
    told = []
    ready = client.documents.wait(made.id, on_progress=told.append)
    live.engine.chunk_delay_s = 0.0
    assert (ready.status, ready.snapshot.state, told[-1]) == ("ready", "ready", ready)
    done = [each.progress.done for each in told if each.status == "prefilling"]
    assert len(done) > 2
    assert done == sorted(done)
    client.documents.delete(made.id)


def test_waiting_has_an_end(client, document, live):
    live.engine.chunk_delay_s = 30.0
    made = client.documents.upload(b"It takes too long. " * 40, filename="slow.txt")
    with pytest.raises(TimedOut, match="goes on at the server"):
        client.documents.wait(made.id, timeout_s=0.3)
    live.engine.chunk_delay_s = 0.0
    assert client.documents.cancel(made.id).status == "cancelled"
    with pytest.raises(DocumentFailed) as stopped:
        client.documents.wait(made.id)
    assert (stopped.value.code, stopped.value.document.status) == ("cancelled", "cancelled")
    with pytest.raises(Conflict):
        client.documents.cancel(document.id)
    client.documents.delete(made.id)


def test_documents_are_listed_page_by_page(client, document):
    made = [client.documents.upload(b"Another one. %d" % n, filename=f"{n}.txt").id for n in range(4)]
    listed = [each.id for each in client.documents.list(page_size=2)]
    assert listed == [*reversed(made), document.id]
    some = client.documents.list_some(limit=2, after=made[2])
    assert ([each.id for each in some.data], some.has_more) == ([made[1], made[0]], True)
    assert list(client.documents.list(shared=True)) == []
    for each in made:
        client.documents.wait(each)
        client.documents.delete(each)


def test_a_list_goes_on_while_what_it_told_is_deleted(client, document):
    made = [client.documents.upload(b"One of many. %d" % n, filename=f"{n}.txt").id for n in range(5)]
    for each in client.documents.list(page_size=2):
        if each.id != document.id:
            client.documents.delete(each.id)
            made.remove(each.id)
    assert made == []
    sessions = [client.sessions.create(document.id).id for _ in range(5)]
    for each in client.sessions.list(page_size=2):
        client.sessions.delete(each.id)
    assert not set(sessions) & {each.id for each in client.sessions.list()}


@pytest.mark.anyio
async def test_so_does_one_of_asyncio(live, document):
    async with AsyncClient(live.url, timeout=60) as client:
        made = [(await client.sessions.create(document.id)).id for _ in range(5)]
        async for each in client.sessions.list(page_size=2):
            await client.sessions.delete(each.id)
        assert not set(made) & {each.id async for each in client.sessions.list()}


def test_a_file_is_sent_as_it_was_when_it_was_opened(client, tmp_path):
    path = tmp_path / "growing.log"
    path.write_bytes(TEXT * 2000)

    def grow(*_):
        with path.open("ab") as file:
            file.write(b"later\n")

    made = client.documents.upload(path, on_progress=grow)
    assert (made.nbytes, made.sha256) == (len(TEXT) * 2000, hashlib.sha256(TEXT * 2000).hexdigest())
    assert path.stat().st_size > len(TEXT) * 2000
    with pytest.raises(OSError, match=r"growing.log became shorter"):
        client.documents.upload(path, on_progress=lambda *_: path.write_bytes(b""))
    client.documents.delete(made.id)


def test_a_name_that_is_not_utf8_is_sent(client, tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    path.write_bytes(TEXT * 3)
    made = client.documents.upload(path)
    assert made.filename == "caf?.txt"
    client.documents.delete(made.id)


def test_a_file_is_saved_to_where_it_is_wanted(client, document, tmp_path):
    long = tmp_path / ("n" * 250 + ".txt")
    assert client.documents.save_file(document.id, long).read_bytes() == TEXT
    (tmp_path / "link").symlink_to(long.name)
    long.write_bytes(b"before")
    client.documents.save_file(document.id, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert long.read_bytes() == TEXT
    os.mkfifo(tmp_path / "pipe")
    got = []
    reading = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reading.start()
    client.documents.save_file(document.id, tmp_path / "pipe")
    reading.join(60)
    assert got == [TEXT]
    assert (tmp_path / "pipe").is_fifo()


def test_a_document_is_seen_changed_and_deleted(client, tmp_path):
    made = client.documents.wait(client.documents.upload(TEXT * 2, filename="a.txt", ttl_s=5000).id)
    assert client.documents.get(made.id) == made
    assert made.expires_at is not None
    assert client.documents.page(made.id, 1).text.startswith("The safety officer")
    assert [page.number for page in client.documents.pages(made.id)] == [1, 2, 3]
    assert client.documents.save_file(made.id, tmp_path / "copy").read_bytes() == TEXT * 2
    changed = client.documents.update(made.id, title="New", ttl_s=None)
    assert (changed.title, changed.expires_at) == ("New", None)
    assert client.documents.pin(made.id).pinned
    assert not client.documents.unpin(made.id).pinned
    receipt = client.documents.delete(made.id)
    assert {"file", "text"} <= {part.tier for part in receipt.removed if part.objects}
    with pytest.raises(NotFound):
        client.documents.get(made.id)
    with pytest.raises(NotFound):
        client.documents.save_file(made.id, tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_sessions_are_forked_listed_and_deleted(client, document, session):
    first = client.ask(session.id, "Who?")
    client.ask(session.id, "And the fee?")
    fork = client.sessions.fork(session.id, after_turn=first.id, title="Another way")
    assert (fork.title, fork.forked_from, [turn.question for turn in fork.turns]) == (
        "Another way",
        session.id,
        ["Who?"],
    )
    assert [each.id for each in client.sessions.list(page_size=1)][:2] == [fork.id, session.id]
    assert client.sessions.list_some(limit=1).has_more
    client.sessions.delete(session.id)
    with pytest.raises(NotFound):
        client.sessions.get(session.id)
    detail = client.sessions.get(fork.id)
    assert (detail.usage.turns, detail.turns[0].answer.text) == (1, first.text)


def test_an_answer_as_a_whole_and_as_it_is_made(client, document, session, live):
    live.engine.reply = ("The safety officer ", "is Bartholomew Kemp.")
    with client.stream(session.id, "Who?", max_tokens=50, stop=["###"]) as events:
        seen = list(events)
    assert [type(each) for each in seen] == [Token, Token, Citation, Done]
    assert "".join(each.text for each in seen if isinstance(each, Token)) == seen[-1].answer.text == events.text
    assert (seen[2].page, seen[2].document_id) == (1, document.id)
    whole = client.ask(session.id, "Who?")
    assert whole.text == events.text
    assert whole.usage.reused_tokens > document.token_count
    taken_up = client.follow(session.id, events.answer_id, "19")
    assert list(taken_up) == seen[1:]
    assert list(client.follow(session.id, events.answer_id, events.last_event_id)) == []
    assert client.follow(session.id, events.answer_id).answer() == seen[-1].answer


def test_a_question_that_is_sent_again_is_asked_once(client, session):
    answers = [client.ask(session.id, "Who?", idempotency_key="a1") for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(client.sessions.get(session.id).turns) == 1
    with pytest.raises(Invalid) as reused:
        client.ask(session.id, "Another?", idempotency_key="a1")
    assert reused.value.code == "idempotency_key_reused"


def test_leaving_a_stream_closes_it(client, session, live, counting):
    with client.stream(session.id, "Count") as events:
        seen = [next(events) for _ in range(3)]
    assert [piece.end for piece in seen] == [len("".join(PIECES[:n])) for n in (1, 2, 3)]
    assert list(events) == []
    assert client.follow(session.id, events.answer_id).answer().text == counting


def test_refusals_are_typed_and_say_what_to_do(client, document, session):
    with pytest.raises(NotFound) as missing:
        client.documents.get("doc_unknown")
    assert (missing.value.status, missing.value.code) == (404, "not_found")
    assert missing.value.instance.startswith("urn:preread:request:")
    with pytest.raises(Invalid) as invalid:
        client.ask(session.id, "Who?", max_tokens=-1)
    assert invalid.value.param == "max_tokens"
    with pytest.raises(Invalid, match="ttl_s"):
        client.documents.update(document.id, ttl_s="soon")  # type: ignore[arg-type]
    with pytest.raises(TooLarge):
        client.documents.upload(b"x" * (2 << 20))
    with pytest.raises(Invalid, match="no user of this name"):
        client.sessions.shares.create(session.id, "user", user="nobody")


def test_a_session_answers_one_question_at_a_time(client, session, counting):
    with client.stream(session.id, "Count") as events:
        next(events)
        with pytest.raises(Conflict) as busy:
            client.ask(session.id, "And?")
        assert busy.value.code == "session_busy"
        assert events.answer().text == counting


def test_an_answer_that_fails_is_an_error_that_can_be_retried(client, session, live):
    live.engine.fail_next("answer", Failed("engine_lost", "the engine process ended", retryable=True))
    with pytest.raises(Unavailable) as lost:
        client.ask(session.id, "Who?")
    assert lost.value.retry_after_s is not None
    assert lost.value.problem.retryable
    assert client.ask(session.id, "Who?").text


@pytest.mark.parametrize("id", ["", ".", ".."])
def test_an_id_that_would_be_another_address_is_none(client, id):
    with pytest.raises(ValueError, match="no id"):
        client.documents.delete(id)


def test_strange_ids_are_of_nothing(client):
    for id in ("../sessions", "a/b", "a?b=c", "ä#"):
        with pytest.raises(NotFound):
            client.documents.get(id)


def test_a_server_that_is_not_there(client):
    with Client("http://127.0.0.1:9", retries=1) as nobody, pytest.raises(ConnectionFailed, match="running"):
        nobody.sessions.get("ses_x")
    assert client.is_ready()


@pytest.mark.parametrize("url", ["", "127.0.0.1:8420", "ftp://host", "http://", "http://host:port"])
def test_an_address_that_is_none(url):
    with pytest.raises(ValueError, match="address"):
        Client(url)


@pytest.mark.parametrize("key", ["", "two\nlines", "schlüssel"])
def test_a_key_that_is_none(key):
    with pytest.raises(ValueError, match="key"):
        Client("http://localhost", key)


def test_threads_share_a_client(client, document):
    answers = []

    def ask():
        answers.append(client.ask(client.sessions.create(document.id).id, "Who?").text)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 6
    assert len(set(answers)) == 1


class Once(io.RawIOBase):
    """As from a pipe: it can be read once."""

    def __init__(self, content):
        self._rest = io.BytesIO(content)

    def readable(self):
        return True

    def readinto(self, buffer):
        return self._rest.readinto(buffer)
