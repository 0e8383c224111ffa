"""Answers that outlive the process that began them: two API processes in one event loop, over one engine."""

import asyncio
import json

import pytest

from service.core.sampling import Question
from service.engine.fake import FakeEngine
from service.engine.messages import Failed

TEXT = b"The keeper is Marta Kovalenko. " * 50
WORDS = [f"word{n} " for n in range(40)]
WHOLE = "".join(WORDS)
SHARED = {"fleet_url": "redis://is-not-asked", "lease_s": 0.4, "disconnect_grace_s": 1.0}


class OutlivingEngine(FakeEngine):
    """Its answers run in tasks of their own, as in workers: whoever attaches gets all their events."""

    def __init__(self, **options):
        super().__init__(WORDS, max_context=20_000, **options)
        self._kept = {}
        self._news = asyncio.Condition()
        self._tasks = set()
        self._leaving = 0

    async def answer(self, request):
        events = self._kept[request.request_id] = []
        task = asyncio.create_task(self._run_on(request, events))
        self._tasks.add(task)
        try:
            async for event in self.attach(request.request_id):
                yield event
        finally:
            if not self._leaving and not task.done():
                await self.cancel(request.request_id)

    async def attach(self, request_id):
        events, n = self._kept.get(request_id), 0
        if events is None:
            yield Failed("unknown_request", "never sent", retryable=True)
            return
        while not (n and n == len(events) and _ends(events[-1])):
            async with self._news:
                await self._news.wait_for(lambda: len(events) > n)  # noqa: B023
            for event in events[n:]:
                n += 1
                yield event

    def detached(self):
        return _Leaving(self)

    async def _run_on(self, request, events):
        async for event in super().answer(request):
            events.append(event)
            async with self._news:
                self._news.notify_all()

    async def end(self):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Leaving:
    def __init__(self, engine):
        self.engine = engine

    def __enter__(self):
        self.engine._leaving += 1

    def __exit__(self, *_):
        self.engine._leaving -= 1


def _ends(event):
    return type(event).__name__ in ("AnswerDone", "Failed")


@pytest.fixture
async def engine(anyio_backend):
    made = OutlivingEngine(token_delay_s=0.05)
    yield made
    await made.end()


@pytest.fixture
async def one(engine, open_client, reader):
    async with open_client(SHARED, read=reader) as client:
        yield client


@pytest.fixture
async def other(engine, open_client, reader):
    async with open_client(SHARED, read=reader) as client:
        yield client


@pytest.fixture
async def asked(one, made):
    """A session with a question whose answer is being given by `one`; the address of its events."""
    document_id = (await made(one, TEXT))["id"]
    session_id = (await one.post("/v1/sessions", json={"document_ids": [document_id]})).json()["id"]
    stream = await _ask(one, session_id)
    return document_id, session_id, stream.answer_id


async def _ask(client, session_id):
    return await client.services.conversations.answers.ask("local", session_id, Question("Who is the keeper?"))


def _address(session_id, answer_id):
    return f"/v1/sessions/{session_id}/questions/{answer_id}/events"


async def events_at(client, asked, last_event_id=None):
    """Names, ids and text of the events that a process gives, and the id of the last one."""
    headers = {} if last_event_id is None else {"Last-Event-ID": str(last_event_id)}
    response = await client.get(_address(*asked[1:]), headers=headers, timeout=60)
    assert response.status_code == 200
    return _parsed(response.text)


def _parsed(body):
    events = []
    for part in body.replace("\r\n", "\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in part.splitlines() if ": " in line and not line.startswith(":"))
        if "event" in fields:
            events.append((fields["event"], fields.get("id"), json.loads(fields["data"])))
    return events


def text_of(events):
    return "".join(data["text"] for name, _, data in events if name == "token")


async def turn_of(client, asked):
    async with client.services.db.reading() as uow:
        return await uow.turns.get(*asked[1:])


@pytest.mark.anyio
async def test_events_are_the_same_at_a_process_that_does_not_carry_the_answer(one, other, asked):
    here, there = await asyncio.gather(events_at(one, asked), events_at(other, asked))
    assert text_of(here) == text_of(there) == WHOLE
    assert here[-1] == there[-1]
    assert there[-1][0] == "done"


@pytest.mark.anyio
async def test_a_reader_goes_on_at_the_other_where_it_was(one, other, asked):
    await asyncio.sleep(0.3)
    seen = text_of(await events_at(other, asked, last_event_id=len(WORDS[0])))
    assert WORDS[0] + seen == WHOLE


@pytest.mark.anyio
async def test_an_answer_that_is_read_at_the_other_only_is_not_given_up(one, other, asked, engine):
    engine.token_delay_s = 0.15  # six seconds, several times the grace time
    events = await events_at(other, asked)
    assert text_of(events) == WHOLE
    assert (await turn_of(one, asked)).status == "done"


@pytest.mark.anyio
async def test_an_answer_that_nobody_reads_anywhere_is_given_up(one, other, asked, eventually):
    stream = await one.services.conversations.answers.stream("local", *asked[1:])
    async for _ in stream.events():
        break
    await eventually(lambda: stream.closed)
    assert (await turn_of(one, asked)).status == "cancelled"


@pytest.mark.anyio
async def test_a_process_that_leaves_hands_its_answer_over(open_client, reader, other, made, engine):
    async with open_client(SHARED, read=reader) as leaving:
        document_id = (await made(leaving, TEXT))["id"]
        session_id = (await leaving.post("/v1/sessions", json={"document_ids": [document_id]})).json()["id"]
        asked = document_id, session_id, (await _ask(leaving, session_id)).answer_id
        await asyncio.sleep(0.2)
    events = await events_at(other, asked)
    assert text_of(events) == WHOLE
    assert events[-1][0] == "done"
    turn = await turn_of(other, asked)
    assert (turn.status, turn.answer, turn.lease_owner) == ("done", WHOLE, None)
    assert len(engine.answered) == 1


@pytest.mark.anyio
async def test_a_lost_process_finds_its_answer_taken_over_and_does_not_spoil_it(one, other, asked, engine):
    reading = asyncio.create_task(events_at(one, asked))
    await asyncio.sleep(0.2)
    one.services.leases._task.cancel()  # it stands still
    async with asyncio.timeout(60):
        while (await turn_of(other, asked)).lease_owner != other.services.leases.owner:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.05)
    assert not await one.services.leases._beat()  # it is back
    cut = await reading
    name, id, data = cut[-1]
    assert (name, id, data["error"]["code"]) == ("error", None, "taken_over")
    rest = await events_at(other, asked, last_event_id=len(text_of(cut)))
    assert text_of(cut) + text_of(rest) == WHOLE
    assert rest[-1][0] == "done"
    assert len(engine.answered) == 1


@pytest.mark.anyio
async def test_one_question_at_a_time_in_a_session_over_all_processes(one, other, asked):
    response = await other.post(f"/v1/sessions/{asked[1]}/questions", json={"question": "And now?"})
    assert (response.status_code, response.json()["error"]["code"]) == (409, "session_busy")


@pytest.mark.anyio
async def test_a_session_deleted_at_the_other_ends_its_answer(one, other, asked, eventually):
    assert (await other.delete(f"/v1/sessions/{asked[1]}")).status_code == 204
    await eventually(lambda: not one.services.conversations.answers.running)
    for client in (one, other):
        assert (await client.get(_address(*asked[1:]))).status_code == 404


@pytest.mark.anyio
async def test_a_document_deleted_at_the_other_is_answered_about_nowhere(one, other, asked, eventually, engine):
    assert (await other.delete(f"/v1/documents/{asked[0]}")).status_code == 200
    await eventually(lambda: not one.services.conversations.answers.running)
    n_answered = len(engine.answered)
    for client in (one, other):
        assert (await client.get(_address(*asked[1:]))).status_code == 404
        response = await client.post(f"/v1/sessions/{asked[1]}/questions", json={"question": "Who?"})
        assert response.status_code == 404
    assert (len(engine.answered), engine.snapshots) == (n_answered, {})


@pytest.mark.anyio
async def test_an_answer_of_which_nothing_is_known_ends_with_a_retryable_error(one, other, asked, engine):
    engine._kept.clear()
    one.services.leases._task.cancel()
    async with asyncio.timeout(60):
        while (await turn_of(other, asked)).status == "running":  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.05)
    (event,) = await events_at(other, asked)
    assert (event[0], event[2]["error"]["code"], event[2]["retryable"]) == ("error", "interrupted", True)
