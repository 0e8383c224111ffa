"""Chat completions, asked by the `openai` package as it is."""

import base64

import openai
import pytest

from tests.service.api.openai.conftest import REPLY, TEXT

ANSWER = "".join(REPLY)
FEE = "How much is the connection fee?"


def about(file_id: str, question: str = FEE) -> list[dict]:
    return [
        {
            "role": "user",
            "content": [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": question}],
        }
    ]


@pytest.fixture(scope="module")
def file(world):
    return world.file()


@pytest.fixture(scope="module")
def client(world):
    return world.client()


@pytest.fixture(scope="module")
def n_document(world, file):
    """Tokens of the file's document."""
    with world.http() as http:
        return http.get(f"/v1/documents/{file.id.replace('file-', 'doc_')}").json()["token_count"]


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("demo", "model", "preread")
    assert client.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-4o")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_a_file_and_a_question(client, file, n_document):
    asked = client.chat.completions.create(model="demo", messages=about(file.id))
    assert asked.id.startswith("chatcmpl-")
    assert asked.object == "chat.completion"
    (choice,) = asked.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "stop", "assistant")
    assert choice.message.content == ANSWER
    usage = asked.usage
    assert usage.prompt_tokens_details.cached_tokens == n_document
    assert usage.prompt_tokens > n_document
    assert usage.completion_tokens == len(REPLY)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    more = asked.preread
    assert more["citations"][0]["page"] == 1
    assert more["usage"]["document_tokens"] == n_document


def test_a_follow_up_goes_on_in_the_session_and_a_changed_one_beside_it(world, client, file, n_document):
    messages = about(file.id, "Who is the safety officer?")
    first = client.chat.completions.create(model="demo", messages=messages)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "And the fee?"}]
    second = client.chat.completions.create(model="demo", messages=messages)
    assert second.preread["session_id"] == first.preread["session_id"]
    assert second.usage.prompt_tokens_details.cached_tokens > n_document + first.preread["usage"]["prefilled_tokens"]
    assert second.usage.prompt_tokens_details.cached_tokens + second.preread["usage"]["prefilled_tokens"] == (
        second.usage.prompt_tokens
    )
    # The same again, as when somebody lets an answer be made anew: the first turn is not computed again.
    again = client.chat.completions.create(model="demo", messages=messages)
    assert again.preread["session_id"] not in (first.preread["session_id"], second.preread["session_id"][:-1])
    assert again.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens_details.cached_tokens
    assert len(world.engine.answered[-1].turns) == 1


def test_a_history_that_no_session_has_is_computed(world, client, file, n_document):
    messages = about(file.id, "Never asked here?")
    messages += [{"role": "assistant", "content": "Said elsewhere."}, {"role": "user", "content": "So?"}]
    asked = client.chat.completions.create(model="demo", messages=messages)
    assert asked.usage.prompt_tokens_details.cached_tokens == n_document
    request = world.engine.answered[-1]
    prompts = world.services.chats.repeated._prompts
    said = prompts.tokenizer.decode([*request.turns[0].token_ids, *request.prompt_ids], keep_control=True)
    assert said == (
        "<|im_start|>user\nNever asked here?<|im_end|>\n<|im_start|>assistant\nSaid elsewhere.<|im_end|>\n"
        "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert asked.usage.prompt_tokens == n_document + len(request.turns[0].token_ids) + len(request.prompt_ids)


def test_a_stream_has_the_chunks_of_openai(client, file, n_document):
    stream = client.chat.completions.create(
        model="demo", messages=about(file.id, "In pieces?"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert not chunks[-1].choices
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == n_document
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_without_usage_says_none_and_ends_with_done(world, file):
    body = {"model": "demo", "messages": about(file.id, "Raw?"), "stream": True}
    with world.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith(("data: {", "data: [DONE]", ":")) for line in lines)
    assert '"usage":null' not in "".join(lines)


def test_a_file_inside_a_request_becomes_a_document_once(client):
    text = b"The keeper of the lighthouse is Marta Kovalenko. " * 20
    data = "data:text/plain;base64," + base64.b64encode(text).decode()
    part = {"type": "file", "file": {"file_data": data, "filename": "keeper.txt"}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "Who keeps the lighthouse?"}]}]
    asked = [client.chat.completions.create(model="demo", messages=messages) for _ in range(2)]
    assert [each.choices[0].message.content for each in asked] == [ANSWER, ANSWER]
    files = [file for file in client.files.list() if file.filename == "keeper.txt"]
    assert len(files) == 1
    assert files[0].expires_at > files[0].created_at


def test_documents_can_be_named_in_metadata(client, file, n_document):
    document_id = file.id.replace("file-", "doc_")
    for named in (document_id, file.id, f'["{document_id}"]'):
        asked = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": FEE}], metadata={"document_ids": named, "mine": "x"}
        )
        assert asked.usage.prompt_tokens_details.cached_tokens == n_document


def test_it_works_without_any_document(world, client):
    asked = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hello."}])
    assert asked.choices[0].message.content == ANSWER
    assert asked.usage.prompt_tokens_details.cached_tokens > 0
    assert not [file for file in client.files.list() if "blank" in file.filename]


def test_system_messages_are_said_with_the_question(world, client, file):
    messages = [{"role": "system", "content": "Answer in French."}, *about(file.id, "What of it?")]
    client.chat.completions.create(model="demo", messages=messages)
    prompts = world.services.chats.repeated._prompts
    said = prompts.tokenizer.decode(world.engine.answered[-1].prompt_ids)
    assert "Answer in French.\n\nWhat of it?" in said


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"logprobs": True}, "logprobs", "unsupported_parameter"),
        ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter"),
        ({"temperature": 9}, "temperature", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"extra_body": {"made_up": 1}}, "made_up", "unknown_parameter"),
        ({"metadata": {"mine": "x" * 513}}, "metadata", "invalid_value"),
        ({"metadata": {"document_ids": "doc_00000000000000000000000000"}}, None, "not_found"),
    ],
)
def test_what_would_change_the_answer_is_refused(client, more, param, code):
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": FEE}], **more)
    assert refused.value.status_code == (404 if code == "not_found" else 400)
    assert (refused.value.code, refused.value.param, refused.value.type) == (code, param, "invalid_request_error")


def test_what_changes_nothing_is_ignored(client, file):
    asked = client.chat.completions.create(
        model="demo", messages=about(file.id), user="u", store=True, service_tier="auto", parallel_tool_calls=False,
        seed=7, n=1, presence_penalty=0, frequency_penalty=0, reasoning_effort="low", tool_choice="none",
        response_format={"type": "text"}, prompt_cache_key="k", safety_identifier="s", top_p=0.9, stop=["XX"],
    )  # fmt: skip
    assert asked.choices[0].message.content == ANSWER


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}], "messages"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "tool", "content": "x", "tool_call_id": "c"}], "messages[0].role"),
        (
            [{"role": "user", "content": [{"type": "file", "file": {"file_data": "%%%"}}]}],
            "messages[0].content[0].file",
        ),
    ],
)
def test_messages_that_cannot_be_answered_say_where(client, messages, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="demo", messages=messages)
    assert refused.value.param == param


def test_too_long_is_context_length_exceeded(world, client, file):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="demo", messages=about(file.id, "word " * 5000))
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")

    async def made_for_nothing() -> int:
        async with world.services.db.reading() as uow:
            ids = await uow.sessions.of_owner("local")
            return len([each for each in ids if not await uow.turns.of_session(each)])

    assert world.call(made_for_nothing()) == 0, "what was made for a refused question is removed"


def test_an_unknown_model_and_file(client, file):
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-4o", messages=about(file.id))
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="demo", messages=about("file-00000000000000000000000000"))


def test_a_file_that_is_still_read_is_waited_for(world, client):
    world.engine.chunk_delay_s = 0.3
    try:
        file = client.files.create(file=("slow.txt", TEXT.encode() * 4 + b"slow"), purpose="assistants")
        assert (file.status, file.purpose, file.object) == ("uploaded", "assistants", "file")
        body = {"model": "demo", "messages": about(file.id), "stream": True}
        with world.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[0].startswith(":"), "a heartbeat while it waits"
        assert lines[-1] == "data: [DONE]"
        file = client.files.create(file=("slower.txt", TEXT.encode() * 4 + b"slower"), purpose="assistants")
        assert (
            client.chat.completions.create(model="demo", messages=about(file.id)).choices[0].message.content == ANSWER
        )
    finally:
        world.engine.chunk_delay_s = 0.0


def test_a_failure_in_a_stream_is_told_as_an_error(world, client, file):
    from service.engine.messages import Failed

    world.engine.fail_next("answer", Failed("internal", "it broke"))
    with pytest.raises(openai.APIError) as failed:
        list(client.chat.completions.create(model="demo", messages=about(file.id, "Broken?"), stream=True))
    assert failed.value.body["type"] == "server_error"
    world.engine.fail_next("answer", Failed("internal", "it broke"))
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="demo", messages=about(file.id, "Broken too?"))


def test_the_same_idempotency_key_is_the_same_answer(world, client, file):
    n = len(world.engine.answered)
    headers = {"Idempotency-Key": "chat-1"}
    asked = [
        client.chat.completions.create(model="demo", messages=about(file.id, "Once?"), extra_headers=headers)
        for _ in range(2)
    ]
    assert asked[0].id == asked[1].id
    assert len(world.engine.answered) == n + 1
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="demo", messages=about(file.id, "Another?"), extra_headers=headers)
    assert refused.value.code == "idempotency_key_reused"
