"""Requests beside each other: the same history at once, the same link, a document that is used in several ways; and
what is refused leaves nothing."""

import asyncio
import base64
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import openai
import pytest

from service.core.chats.dialogue import Exchange
from service.core.key_ring import KeyRing
from service.core.sampling import Question
from service.errors import Conflict
from tests.service.api.openai.conftest import REPLY, TEXT

ANSWER = "".join(REPLY)


@pytest.fixture(scope="module")
def client(world):
    return world.client()


@pytest.fixture(scope="module")
def file(world):
    return world.file()


def about(file_id: str, *texts: str) -> list[dict]:
    """Questions and answers in turn, over a file."""
    first = [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": texts[0]}]
    rest = [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts) if n]
    return [{"role": "user", "content": first}, *rest]


def test_many_with_the_same_history_at_once_do_not_meet(world, client, file):
    """As when the same examples stand before every question."""
    n = len(world.engine.answered)
    said = ("An example?", "Its answer.")

    def ask(number: int):
        return client.chat.completions.create(model="demo", messages=about(file.id, *said, f"Number {number}?"))

    with ThreadPoolExecutor(12) as pool:
        asked = list(pool.map(ask, range(36)))
    assert [each.choices[0].message.content for each in asked] == [ANSWER] * 36
    assert len({each.preread["session_id"] for each in asked}) == 36
    assert {len(request.turns) for request in world.engine.answered[n:]} == {1}


def test_a_session_whose_question_has_not_begun_is_not_found(world, file):
    places, document_id = world.services.chats.chats._places, file.id.replace("file-", "doc_")

    async def twice():
        history = [Exchange("Written down?", "Yes.")]
        made = [await places.of("local", [document_id], history) for _ in range(2)]
        for place in made:
            await places.drop("local", place)
        return made

    first, second = world.call(twice())
    assert (first.is_new, second.is_new) == (True, True)
    assert first.session_id != second.session_id


def test_a_session_that_went_on_meanwhile_is_not_gone_on_in(world, client, file):
    asked = client.chat.completions.create(model="demo", messages=about(file.id, "Gone on?"))
    ask = world.services.conversations.answers.ask
    with pytest.raises(Conflict) as refused:
        world.call(ask("local", asked.preread["session_id"], Question("So?"), after="ans_another"))
    assert refused.value.code == "session_busy"


def test_a_file_that_had_come_inside_a_request_stays_once_it_is_uploaded(world, client):
    data = b"The lamp is lit by Ada Brightwater. " * 20
    part = {"type": "file", "file": {"file_data": base64.b64encode(data).decode(), "filename": "inside.txt"}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "Who lights it?"}]}]
    client.chat.completions.create(model="demo", messages=messages)
    (inside,) = [each for each in client.files.list() if each.filename == "inside.txt"]
    assert inside.expires_at is not None
    uploaded = client.files.create(file=("lamp.txt", data), purpose="assistants")
    assert (uploaded.id, uploaded.filename, uploaded.purpose) == (inside.id, "lamp.txt", "assistants")
    assert uploaded.expires_at is None
    client.chat.completions.create(model="demo", messages=messages)
    assert client.files.retrieve(inside.id).expires_at is None


def test_a_file_inside_a_request_lives_on_when_it_is_asked_about_by_its_id(world, client):
    data = base64.b64encode(b"The bell is rung by Odo Marsh. " * 20).decode()
    part = {"type": "input_file", "file_data": data, "filename": "bell.txt"}
    content = [part, {"type": "input_text", "text": "Who rings it?"}]
    first = client.responses.create(model="demo", input=[{"role": "user", "content": content}])
    (inside,) = [each for each in client.files.list() if each.filename == "bell.txt"]

    async def soon() -> None:
        async with world.services.db.writing() as uow:
            soon = world.services.clock.now() + 100
            await uow.documents.change(inside.id.replace("file-", "doc_"), expires_at=soon)

    world.call(soon())
    client.responses.create(model="demo", input="And when?", previous_response_id=first.id)
    assert client.files.retrieve(inside.id).expires_at >= inside.expires_at


def test_a_conversation_without_a_document_can_get_one(world, client, file):
    first = client.responses.create(model="demo", input="Hello.")
    second = client.responses.create(
        model="demo", input="Who is the safety officer?", previous_response_id=first.id,
        metadata={"document_ids": file.id},
    )  # fmt: skip
    with world.http() as http:
        session = http.get(f"/v1/sessions/{second.preread['session_id']}").json()
    assert session["document_ids"] == [file.id.replace("file-", "doc_")]


def test_a_response_whose_session_was_deleted_meanwhile_is_not_stored(world):
    answer = SimpleNamespace(answer_id="ans_00000000000000000000000000", session_id="ses_00000000000000000000000000")
    world.call(world.services.chats.responses.keep("local", answer, {}))
    with pytest.raises(openai.NotFoundError):
        world.client().responses.retrieve("resp_00000000000000000000000000")


def test_a_history_that_no_context_takes_is_refused_before_it_is_written(world, client, file):
    async def sessions() -> int:
        async with world.services.db.reading() as uow:
            return len(await uow.sessions.of_owner("local"))

    before = world.call(sessions())
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="demo", messages=about(file.id, *["word"] * 4001))
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    assert world.call(sessions()) == before
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(model="demo", messages=about(file.id, *["word"] * 5001))
    assert refused.value.status_code == 413


@pytest.mark.parametrize("depth", [300, 450, 600, 900, 5000])
def test_json_that_is_nested_deeply_is_no_fault_of_the_server(world, depth):
    body = '{"model": "demo", "messages": [], "user": ' + "[" * depth + "]" * depth + "}"
    with world.http() as http:
        answer = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400


def test_a_refused_part_leaves_no_task(world, client):
    upload = client.uploads.create(bytes=10, filename="x.txt", mime_type="text/plain", purpose="user_data")
    for _ in range(3):
        with pytest.raises(openai.APIStatusError) as refused:
            client.uploads.parts.create(upload.id, data=b"x" * (4 << 20))
        assert refused.value.status_code == 413

    async def reading() -> list[str]:
        names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
        return [name for name in names if name == "_part.<locals>.read"]

    world.until(lambda: not world.call(reading()), 5)
    client.uploads.cancel(upload.id)


def test_a_part_of_which_the_disk_lost_some_is_not_made_a_file(world, client):
    upload = client.uploads.create(bytes=10, filename="x.txt", mime_type="text/plain", purpose="user_data")
    part = client.uploads.parts.create(upload.id, data=b"0123456789")
    (world.services.settings.data_dir / "uploads" / upload.id / part.id).write_bytes(b"01234")
    with pytest.raises(openai.ConflictError) as refused:
        client.uploads.complete(upload.id, part_ids=[part.id])
    assert refused.value.code == "parts_elsewhere"
    client.uploads.cancel(upload.id)


def test_who_has_a_link_does_not_come_into_the_session_of_another_who_has_it(small_world, person):
    ann = small_world.call(person(small_world.services, "ann"))
    anns = small_world.client(ann.headers["Authorization"].split()[1])
    file = anns.files.create(file=("a.txt", TEXT.encode()), purpose="user_data")
    small_world.until(lambda: anns.files.retrieve(file.id).status == "processed")
    document_id = file.id.replace("file-", "doc_")
    with small_world.http(headers=ann.headers) as http:
        token = http.post(f"/v1/documents/{document_id}/shares", json={"with": "link"}).json()["token"]
    one, other = small_world.client(token), small_world.client(token)
    first = one.chat.completions.create(model="demo", messages=about(file.id, "What is it about?"))
    messages = about(file.id, "What is it about?", ANSWER, "And what did they ask next?")
    second = other.chat.completions.create(model="demo", messages=messages)
    assert second.preread["session_id"] != first.preread["session_id"]
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == first.usage.prompt_tokens_details.cached_tokens, "nor is it told that it was asked"


def test_a_key_that_is_revoked_while_a_document_is_read_gets_no_answer(small_world, person):
    services = small_world.services
    bob = small_world.call(person(services, "bob"))
    bobs = small_world.client(bob.headers["Authorization"].split()[1])
    n = len(small_world.engine.answered)
    small_world.engine.chunk_delay_s = 0.3
    try:
        file = bobs.files.create(file=("slow.txt", TEXT.encode() * 4), purpose="user_data")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(bobs.chat.completions.create, model="demo", messages=about(file.id, "Who?"))

            async def revoke() -> None:
                await asyncio.sleep(0.3)
                await KeyRing(services.db, services.clock).revoke(bob.key_id)

            small_world.call(revoke())
            with pytest.raises(openai.AuthenticationError):
                asked.result(60)
    finally:
        small_world.engine.chunk_delay_s = 0.0
    assert len(small_world.engine.answered) == n
