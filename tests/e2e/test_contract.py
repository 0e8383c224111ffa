"""The first chapters of the example contract, read once: after a restart nothing but the question is computed.

The demo, which is tested too, does so with all of it and from its PDF.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import ROOT, Server

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
CONTRACT = ROOT / "examples" / "contract" / "contract.md"
NEXT_CHAPTER = "## 7."
FIRST, FOLLOW_UP = "Who is the safety officer of the Operator?", "When does the agreement expire?"


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Server], demo_model: Path) -> Server:
    return serve_all(model=demo_model)


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    text, found, _ = CONTRACT.read_text(encoding="utf-8").partition(NEXT_CHAPTER)
    assert found
    return server.ready(text.encode(), "contract.md")


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
