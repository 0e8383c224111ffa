"""Responses, by the `openai` package as it is."""

import openai
import pytest

from service.engine.messages import Failed
from tests.service.api.openai.conftest import REPLY

ANSWER = "".join(REPLY)
FEE = "How much is the connection fee?"


@pytest.fixture(scope="module")
def client(world):
    return world.client()


@pytest.fixture(scope="module")
def file(world):
    return world.file()


@pytest.fixture(scope="module")
def n_document(world, file):
    with world.http() as http:
        return http.get(f"/v1/documents/{file.id.replace('file-', 'doc_')}").json()["token_count"]


def about(file_id: str, text: str = FEE) -> list[dict]:
    parts = [{"type": "input_file", "file_id": file_id}, {"type": "input_text", "text": text}]
    return [{"role": "user", "content": parts}]


def test_a_response_and_what_follows_it(client, file, n_document):
    first = client.responses.create(model="demo", input=about(file.id), metadata={"topic": "fees"})
    assert (first.object, first.status, first.output_text) == ("response", "completed", ANSWER)
    assert (first.model, first.metadata, first.error) == ("demo", {"topic": "fees"}, None)
    assert first.usage.input_tokens_details.cached_tokens == n_document
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    (cited, *_) = first.output[0].content[0].annotations
    assert (cited.type, cited.file_id, cited.filename) == ("file_citation", file.id, "contract.txt")
    second = client.responses.create(model="demo", input="And when?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.preread["session_id"] == first.preread["session_id"]
    assert second.usage.input_tokens_details.cached_tokens > n_document
    beside = client.responses.create(model="demo", input="And where?", previous_response_id=first.id)
    assert beside.preread["session_id"] != first.preread["session_id"], "the first one was gone on from already"
    assert beside.usage.input_tokens_details.cached_tokens == second.usage.input_tokens_details.cached_tokens


def test_stored_responses_are_shown_and_deleted(client, file):
    made = client.responses.create(model="demo", input=about(file.id, "Stored?"), instructions="Be brief.")
    shown = client.responses.retrieve(made.id)
    assert shown.model_dump(exclude={"preread"}) == made.model_dump(exclude={"preread"})
    assert shown.instructions == "Be brief."
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model="demo", input="So?", previous_response_id=made.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_response_that_is_not_stored_cannot_be_found(client, file):
    made = client.responses.create(model="demo", input=about(file.id, "Kept?"), store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_history_in_the_input_goes_on_where_it_was(client, file):
    first = client.responses.create(model="demo", input=about(file.id, "Who is it?"), store=False)
    history = [*about(file.id, "Who is it?"), *(item.model_dump() for item in first.output)]
    second = client.responses.create(model="demo", input=[*history, {"role": "user", "content": "And then?"}])
    assert second.preread["session_id"] == first.preread["session_id"]


def test_a_stream_has_the_events_of_openai(client, file, n_document):
    events = list(client.responses.create(model="demo", input=about(file.id, "In pieces?"), stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert "response.output_text.annotation.added" in kinds
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    whole = events[-1].response
    assert whole.output_text == ANSWER
    assert whole.usage.input_tokens_details.cached_tokens == n_document
    assert client.responses.retrieve(whole.id).output_text == ANSWER


def test_the_packages_own_stream_helper_understands_it(client, file):
    with client.responses.stream(model="demo", input=about(file.id, "Helped?")) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == ANSWER


def test_an_answer_that_is_cut_is_incomplete(client, file):
    cut = client.responses.create(model="demo", input=about(file.id, "Short?"), max_output_tokens=1)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output_text == REPLY[0]


def test_a_failure_in_a_stream_is_a_failed_response(world, client, file):
    world.engine.fail_next("answer", Failed("internal", "it broke"))
    events = list(client.responses.create(model="demo", input=about(file.id, "Broken?"), stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert client.responses.retrieve(events[-1].response.id).status == "failed"


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"text": {"format": {"type": "json_object"}}}, "text", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"extra_body": {"made_up": 1}}, "made_up", "unknown_parameter"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type", "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "http://x"}]}]},
         "input[0].content[0]", "unsupported_parameter"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": "word " * 5000}, "input", "context_length_exceeded"),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused(client, more, param, code):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "demo", "input": FEE} | more)
    assert (refused.value.code, refused.value.param) == (code, param)
