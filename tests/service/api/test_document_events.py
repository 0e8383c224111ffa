"""Progress over a real socket: what comes, in which order, and what a reader gets who comes back."""

import asyncio
import json
import threading

import pytest

from service.api.document_events import document_events, is_over, position_after
from service.core.documents import DocumentView
from service.core.progress import Progress
from service.db.models import DocumentRow
from service.engine.fake import FakeEngine

TEXT = b"The keeper is Marta Kovalenko. " * 200


def read_events(response, until=()):
    """(id, name, data) of each event until one is named in `until`, or the stream ends; comments as None."""
    event = {}
    for line in response.iter_lines():
        if line.startswith(":"):
            yield None
        elif line:
            name, _, value = line.partition(": ")
            event[name] = value
        elif event:
            yield event.get("id"), event["event"], json.loads(event["data"])
            if event["event"] in until:
                return
            event = {}


def post(client, data=TEXT):
    fields = {"retention": "full"}
    return client.post("/v1/documents", files={"file": ("a.txt", data)}, data=fields).json()["id"]


def stream(client, document_id, last_event_id=None):
    headers = {"last-event-id": last_event_id} if last_event_id else {}
    return client.stream("GET", f"/v1/documents/{document_id}/events", headers=headers)


@pytest.mark.timeout(600)
def test_progress_then_ready(serving, reader):
    with serving(engine=FakeEngine(chunk_delay_s=0.05), read=reader) as (client, _):
        document_id = post(client)
        with stream(client, document_id) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["cache-control"] == "no-cache"
            events = [event for event in read_events(response) if event]
        names = [name for _, name, _ in events]
        assert names[-1] == "ready"
        assert set(names[:-1]) == {"progress"}
        progress = [data["progress"] for _, _, data in events[:-1]]
        stages = [p["stage"] for p in progress]
        assert stages == sorted(stages, key=["queued", "parsing", "prefilling", "persisting"].index)
        done = [p["done"] for p in progress if p["stage"] == "prefilling"]
        assert len(done) > 5
        assert done == sorted(set(done))
        assert any(p["eta_s"] for p in progress)
        assert len({id for id, _, _ in events}) == len(events)
        # who has seen everything is told to stay away, who has seen a part gets the rest
        with stream(client, document_id, events[-1][0]) as response:
            assert response.status_code == 204
        with stream(client, document_id, events[-3][0]) as response:
            assert [e for e in read_events(response) if e] == [events[-1]]
        with stream(client, document_id, "nonsense") as response:
            assert [e for e in read_events(response) if e] == [events[-1]]


def test_a_quiet_stream_is_kept_alive_and_resumes(serving, reader):
    reader.gate.clear()
    with serving(read=reader) as (client, app):
        document_id = post(client)
        with stream(client, document_id) as response:
            events = read_events(response)
            seen = [next(events) for _ in range(6)]
        assert seen.count(None) >= 2
        last_id = [event for event in seen if event][-1][0]
        with stream(client, document_id, last_id) as response:
            events = read_events(response, until=("ready", "failed"))
            assert next(events) is None
            loop_call(app, reader.gate.set)
            rest = [event for event in events if event]
        assert rest[-1][1] == "ready"
        assert all(order(id) > order(last_id) for id, _, _ in rest)


def loop_call(app, action):
    """Run `action` in the server's event loop."""
    loop = app.state.services.jobs._writer.get_loop()
    done = threading.Event()
    loop.call_soon_threadsafe(lambda: (action(), done.set()))
    assert done.wait(60)


def order(event_id):
    return tuple(map(int, event_id.split("-")))


@pytest.mark.parametrize("how", ["cancel", "fail", "delete"])
def test_every_other_end_is_told_too(serving, reader, how):
    reader.gate.clear()
    with serving(read=reader) as (client, app):
        document_id = post(client, b"x" * 30_000 if how == "fail" else TEXT)
        with stream(client, document_id) as response:
            events = read_events(response)
            next(events)
            url = f"/v1/documents/{document_id}"
            match how:
                case "cancel":
                    client.post(f"{url}/cancel")
                case "delete":
                    client.delete(url)
                case "fail":
                    loop_call(app, reader.gate.set)
            _, name, data = [event for event in events if event][-1]
        if how == "delete":
            assert (name, data["status"], data["error"]["code"]) == ("error", 404, "not_found")
        else:
            expected = {"cancel": ("cancelled", "cancelled"), "fail": ("failed", "context_length_exceeded")}[how]
            assert (name, data["status"], data["error"]["code"]) == ("failed", *expected)


def test_readers_that_leave_hold_nothing_and_delay_nobody(serving, reader):
    reader.gate.clear()
    with serving(read=reader) as (client, app):
        document_id = post(client)
        for _ in range(10):
            with stream(client, document_id) as response:
                next(read_events(response))
        assert client.get(f"/v1/documents/{document_id}").json()["status"] in {"queued", "parsing"}
        loop_call(app, reader.gate.set)
        with stream(client, document_id) as response:
            assert [event for event in read_events(response) if event][-1][1] == "ready"


def test_open_streams_end_when_the_server_begins_to_stop(serving, reader):
    reader.gate.clear()
    with serving(read=reader) as (client, app):
        document_id = post(client)
        with stream(client, document_id) as response:
            events = read_events(response)
            next(events)
            loop_call(app, app.state.services.stopping.set)
            _, name, data = [event for event in events if event][-1]
        assert (name, data["status"]) == ("error", 503)


def view(status, stage=None, done=0):
    row = DocumentRow(
        id="doc_1", owner_id="o", title="t", filename="f", media_type="text/plain", nbytes=1, sha256="0",
        visibility="private", retention={}, pinned=False, warnings=[], snapshot_state="absent", created_at=0.0,
    )  # fmt: skip
    return DocumentView(row, status, Progress(stage or status, done))


@pytest.mark.anyio
async def test_progress_that_begins_again_after_a_restart_is_told_once_it_is_further():
    async def views():
        for done in (0, 5, 30, 40):
            yield view("parsing", done=done)
            await asyncio.sleep(0)
        yield view("ready")

    ids = [event.id async for event in document_events(views(), position_after("1-20"))]
    assert ids == ["1-30", "1-40", "5-0"]


@pytest.mark.parametrize("text", [None, "", "x", "1", "-1-2", "1-", "1-2-3", "999-1", "1-" + "9" * 20])
def test_unknown_event_ids_are_the_beginning(text):
    assert position_after(text) < position_after("0-0")
    assert not is_over(position_after(text))
