"""Long texts without a document: known ones resume, repeated ones become snapshots; and whose they are."""

import openai
import pytest

from tests.service.api.openai.conftest import REPLY

LONG = (
    "# Rules\n\n**Bold** [link](http://a.example)\n\n"
    + "The keeper counts the lamps at every change of the tide.\n\n" * 30
)


def chat(text: str, question: str = "How often?") -> list[dict]:
    return [{"role": "system", "content": text}, {"role": "user", "content": question}]


def cached(client, messages) -> int:
    asked = client.chat.completions.create(model="demo", messages=messages)
    assert asked.choices[0].message.content == "".join(REPLY)
    return asked.usage.prompt_tokens_details.cached_tokens


def test_a_text_that_comes_again_becomes_a_snapshot(small_world):
    client = small_world.client()
    first = cached(client, chat(LONG, "One?"))
    assert first < 300, "the blank document"
    assert cached(client, chat(LONG, "Two?")) == first
    small_world.until(lambda: cached(client, chat(LONG, "Three?")) > len(LONG) - 100)
    # White space aside, and as one part of a message of the user.
    parts = [{"type": "text", "text": LONG.replace("\n\n", "\n \n")}, {"type": "text", "text": "Four?"}]
    assert cached(client, [{"role": "user", "content": parts}]) > len(LONG) - 100
    assert not client.files.list().data, "it is nobody's file"
    with small_world.http() as http:
        titles = [each["title"] for each in http.get("/v1/documents").json()["data"]]
    assert sorted(titles) == ["A repeated prompt", "Conversations without a document"]


def test_a_text_that_is_a_file_resumes_from_it(small_world):
    client = small_world.client()
    text = "Every lamp has a number, and every number has a page in the book.\n" * 40
    file = small_world.file(text)
    assert cached(client, chat(text)) > len(text) - 100
    history = [*chat(text), {"role": "assistant", "content": "".join(REPLY)}, {"role": "user", "content": "And then?"}]
    assert cached(client, history) > len(text) + 10, "the first turn too"
    client.files.delete(file.id)
    assert cached(client, chat(text)) < 300


def test_a_text_too_long_for_a_question_becomes_a_document_at_once(small_world):
    text = "The tide is written down twice a day, by two keepers who do not speak.\n" * 80
    assert cached(small_world.client(), chat(text, "Who?")) > len(text) - 100


def test_what_chats_made_goes_unused(small_world):
    services = small_world.services

    async def later() -> tuple[int, int]:
        now = services.clock.now() + services.settings.chat_ttl_s + 1
        async with services.db.writing() as uow:
            for document in await uow.documents.page("local", limit=50, after=None):
                if document.purpose == "prompt":
                    assert document.expires_at is not None
                    document.expires_at = 1.0
            for owner_id, session_id in await uow.chats.old_sessions(now):
                (await uow.sessions.get(session_id, owner_id)).updated_at = 1.0
        for clean in services.chats.cleaning:
            await clean()
        await services.deletion.delete_expired()
        async with services.db.reading() as uow:
            sessions = await uow.sessions.page("local", limit=50, after=None, now=services.clock.now())
            documents = await uow.documents.page("local", limit=50, after=None)
        return len(sessions), len([each for each in documents if each.purpose == "prompt"])

    assert small_world.call(later()) == (0, 0)


def test_nothing_of_one_owner_is_known_to_another(small_world, person):
    services = small_world.services
    ann, bob = (small_world.call(person(services, name)) for name in ("ann", "bob"))
    asking = small_world.call(person(services, "cyd", scopes=("ask",)))
    keys = [each.headers["Authorization"].split()[1] for each in (ann, bob, asking)]
    anns, bobs, cyds = (small_world.client(key) for key in keys)
    text = "Only Ann knows where the spare lamp is kept, and she tells nobody.\n" * 40
    file = anns.files.create(file=("ann.txt", text.encode()), purpose="user_data")
    small_world.until(lambda: anns.files.retrieve(file.id).status == "processed")
    assert cached(anns, chat(text)) > len(text) - 100
    assert cached(bobs, chat(text)) < 300
    response = anns.responses.create(model="demo", input="Where?", metadata={"document_ids": file.id})
    for call in (
        lambda: bobs.files.retrieve(file.id),
        lambda: bobs.responses.retrieve(response.id),
        lambda: bobs.responses.create(model="demo", input="So?", previous_response_id=response.id),
        lambda: bobs.responses.create(model="demo", input="So?", metadata={"document_ids": file.id}),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.PermissionDeniedError) as refused:
        cyds.files.create(file=("c.txt", text.encode()), purpose="user_data")
    assert refused.value.code == "scope_missing"
    part = {"type": "file", "file": {"file_data": "aGVsbG8gdGhlcmU="}}
    with pytest.raises(openai.PermissionDeniedError):
        cyds.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
        )
    assert cached(cyds, [{"role": "user", "content": "Hello."}]) > 0
    for key in ("", "key_none.none"):
        with pytest.raises(openai.AuthenticationError) as refused:
            small_world.client(key or "x").models.list()
        assert (refused.value.code, refused.value.type) == ("invalid_api_key", "invalid_request_error")
