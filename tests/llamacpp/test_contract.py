"""The torch engine's tests of the contract, on llama.cpp: only the question is computed after a restart, though engine
and server were killed while the document was read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.core.prompts import Prompts, load_prompts
from tests.e2e.builds import build_killed_twice
from tests.e2e.server import Server
from tests.e2e.test_contract import (  # noqa: F401 - collected here, with the fixtures below
    CONTRACT,
    test_after_a_restart_only_the_question_is_computed,
    test_an_openai_client_resumes_from_the_same_snapshot,
)

pytestmark = pytest.mark.timeout(600)
N_TOKENS = 2000


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Server], of_llama: dict[str, Any]) -> Server:
    return serve_all(**of_llama)


@pytest.fixture(scope="module")
def document(server: Server, gguf_model: Path) -> dict[str, Any]:
    prompts: Prompts = load_prompts(gguf_model)
    starts = prompts.tokenizer.encode_plain_offsets(CONTRACT).starts
    document = build_killed_twice(server, CONTRACT[: starts[N_TOKENS]].encode(), "contract.md")
    assert document["token_count"] >= N_TOKENS
    return document
