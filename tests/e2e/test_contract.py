"""A part of the example contract, read once though engine and server are killed meanwhile: after a restart only the
question is computed, and what is stored is what a run gives that never stored anything.

The demo, which is tested too, reads all of it, from its PDF; `make long` a part of 4,000 tokens.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from service.core.prompts import Prompts, load_prompts
from tests.e2e.builds import build_killed_twice
from tests.e2e.referenced import reference
from tests.e2e.server import ROOT, Server, files_below

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
CONTRACT = (ROOT / "examples" / "contract" / "contract.md").read_text(encoding="utf-8")
KV_TYPE = "k8v4"
FIRST, FOLLOW_UP = "Who is the safety officer of the Operator?", "When does the agreement expire?"


@pytest.fixture(scope="module", params=[2400, pytest.param(4000, marks=pytest.mark.long)])
def n_tokens(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Server], demo_model: Path, n_tokens: int) -> Server:
    """One for each document."""
    return serve_all(model=demo_model, compute_dtype="float32", kv_type=KV_TYPE)


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> Prompts:
    return load_prompts(demo_model)


@pytest.fixture(scope="module")
def document(server: Server, prompts: Prompts, n_tokens: int) -> dict[str, Any]:
    starts = prompts.tokenizer.encode_plain_offsets(CONTRACT).starts
    document = build_killed_twice(server, CONTRACT[: starts[n_tokens]].encode(), "contract.md")
    assert document["token_count"] >= n_tokens
    return document


def test_after_a_restart_only_the_question_is_computed(server: Server, document: dict[str, Any]):
    never_stopped, stopped = (server.session(document["id"]) for _ in range(2))
    first, expected = server.ask(never_stopped, FIRST), server.ask(never_stopped, FOLLOW_UP)
    assert server.ask(stopped, FIRST)["answer"] == first["answer"]
    server.stop()
    server.start()

    fresh = server.ask(server.session(document["id"]), FIRST)
    assert fresh["answer"] == first["answer"]
    assert "Bartholomew Kemp" in fresh["answer"]
    assert fresh["usage"]["reused_tokens"] == fresh["usage"]["document_tokens"] == document["token_count"]
    assert fresh["usage"]["prefilled_tokens"] < 40
    assert fresh["cache"]["restored_tokens"] == document["token_count"]
    assert (fresh["cache"]["source"], fresh["cache"]["miss_reason"]) == ("disk", None)
    assert server.engine_stat("document_prefill_tokens_total") == 0
    assert server.engine_stat("prefilled_tokens_total") == fresh["usage"]["prefilled_tokens"]

    follow_up = server.ask(stopped, FOLLOW_UP)
    assert follow_up["answer"] == expected["answer"]
    assert follow_up["usage"]["prefilled_tokens"] == expected["usage"]["prefilled_tokens"] < 40
    assert follow_up["usage"]["reused_tokens"] == expected["usage"]["reused_tokens"] > document["token_count"]
    assert follow_up["cache"]["miss_reason"] is None
    assert server.engine_stat("document_prefill_tokens_total") == 0
    computed = fresh["usage"]["prefilled_tokens"] + follow_up["usage"]["prefilled_tokens"]
    assert server.engine_stat("prefilled_tokens_total") == computed


def test_an_openai_client_resumes_from_the_same_snapshot(server: Server, document: dict[str, Any], demo_model: Path):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    part = {"type": "file", "file": {"file_id": document["id"].replace("doc_", "file-")}}
    messages: list[Any] = [{"role": "user", "content": [part, {"type": "text", "text": FIRST}]}]
    computed = server.engine_stat("prefilled_tokens_total")
    first = client.chat.completions.create(model=demo_model.name, messages=messages)
    assert "Bartholomew Kemp" in (first.choices[0].message.content or "")
    assert first.usage.prompt_tokens_details.cached_tokens == document["token_count"]
    n_first = first.usage.prompt_tokens - document["token_count"]
    assert server.engine_stat("prefilled_tokens_total") == computed + n_first

    said = {"role": "assistant", "content": first.choices[0].message.content}
    messages += [said, {"role": "user", "content": FOLLOW_UP}]
    second = client.chat.completions.create(model=demo_model.name, messages=messages)
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > first.usage.prompt_tokens
    n_second = second.usage.prompt_tokens - (second.usage.prompt_tokens_details.cached_tokens or 0)
    assert server.engine_stat("prefilled_tokens_total") == computed + n_first + n_second

    # Said elsewhere: the history is computed after the document, and goes on to the same answer.
    messages[1] = {"role": "assistant", "content": f"{said['content']} That is all."}
    third = client.chat.completions.create(model=demo_model.name, messages=messages)
    assert third.usage.prompt_tokens_details.cached_tokens == document["token_count"]
    assert third.usage.prompt_tokens > second.usage.prompt_tokens
    assert third.choices[0].message.content == second.choices[0].message.content
    assert server.engine_stat("document_prefill_tokens_total") == 0


def test_a_build_killed_twice_has_the_bytes_and_logits_of_one_that_was_never_stored(
    server: Server, document: dict[str, Any], demo_model: Path, prompts: Prompts
):
    for name in ("building", "trash", "locks"):
        assert files_below(server.store / name) == []
    (directory,) = (server.store / "snapshots").glob("*/documents/*/*")
    owner_id, _, document_id, fingerprint = directory.parts[-4:]
    server.stop()
    compared = reference(
        "never_stored",
        model_dir=str(demo_model),
        snapshots=str(server.store / "snapshots"),
        key=[owner_id, "document", document_id],
        fingerprint=fingerprint,
        kv_type=KV_TYPE,
        question=prompts.template.question("Who represents the Council?"),
    )
    print(compared)
    assert compared["n_tokens"] == document["token_count"]
    assert compared["different_runs"] == 0
    assert compared["largest_difference"] <= 1e-3
