"""Every KV type: the same conversation before a restart, after it, and without a server."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from service.cli import main
from tests.e2e.server import ROOT, Server

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
LETTER = ROOT / "examples" / "letter.txt"
CONVERSATION = {
    "How much does the repair cost?": "2,890",
    "Who is the workshop foreman?": "Gregor Sillars",
}
MAX_TOKENS = 16


def converse(server: Server, document_id: str) -> list[str]:
    session_id = server.session(document_id)
    return [server.ask(session_id, question, max_tokens=MAX_TOKENS)["answer"] for question in CONVERSATION]


ASK = ["ask", str(LETTER), *CONVERSATION, "--max-tokens", str(MAX_TOKENS), "--json"]


def right(answers: list[str]) -> list[str]:
    for answer, value in zip(answers, CONVERSATION.values(), strict=True):
        assert value in answer
    return answers


def asked_here(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `preread ask` says over the data directory of a server that does not run: in this process, which loads what
    an engine takes long to load once for all tests."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return json.loads(CliRunner().invoke(main, ASK).stdout)["answers"]


def test_the_same_answers_before_and_after_a_restart_and_without_a_server(
    serve, demo_model: Path, monkeypatch: pytest.MonkeyPatch
):
    server: Server = serve(model=demo_model)
    document = server.ready(LETTER.read_bytes(), LETTER.name)
    before = right(converse(server, document["id"]))
    server.stop()
    answers = asked_here(server, monkeypatch)
    assert [answer["answer"] for answer in answers] == before
    assert answers[0]["usage"]["reused_tokens"] == document["token_count"]
    server.start()
    assert converse(server, document["id"]) == before
    assert server.engine_stat("document_prefill_tokens_total") == 0


@pytest.mark.parametrize("kv_type", ["fp16", "k8v8", "k4v4"])
def test_answers_in_every_kv_type_are_those_of_the_engine_that_read_the_document(
    demo_model: Path, tmp_path: Path, kv_type: str, monkeypatch: pytest.MonkeyPatch
):
    """Asked about by the engine that read it, then by one that finds what is stored."""
    stopped = Server(tmp_path / "data", model=demo_model, kv_type=kv_type)
    first, second = (asked_here(stopped, monkeypatch) for _ in range(2))
    assert [answer["answer"] for answer in second] == right([answer["answer"] for answer in first])
    assert (second[0]["cache"]["source"], second[0]["cache"]["miss_reason"]) == ("disk", None)
    assert second[0]["usage"]["reused_tokens"] == first[0]["usage"]["document_tokens"]
    manifests = [json.loads(path.read_bytes()) for path in (stopped.store / "snapshots").rglob("manifest.json")]
    assert {manifest["body"]["layout"]["kv_type"] for manifest in manifests} == {kv_type}


def test_a_kv_type_that_failed_its_gate_is_refused_with_the_figure(demo_model: Path, tmp_path: Path):
    """The demo model passes in every KV type, so the verdict is planted in a copy of its card."""
    model = tmp_path / "model"
    shutil.copytree(demo_model, model, symlinks=False, copy_function=shutil.copyfile)
    card = json.loads((model / "preread.json").read_text())
    card["kv_types"]["k4v4"] |= {"mean_kl": 0.1234, "allowed": False}
    (model / "preread.json").unlink()
    (model / "preread.json").write_text(json.dumps(card))
    refused = Server(tmp_path / "data", model=model, kv_type="k4v4").run("serve", "--port", "0")
    assert refused.returncode not in (0, None)
    assert "mean KL of 0.1234" in " ".join(refused.stderr.split())


def test_another_kv_type_reads_the_document_again_and_says_why(serve, demo_model: Path):
    """Answers of this engine hash every byte of the KV they build on."""
    server: Server = serve(fake={"model_dir": str(demo_model)}, kv_type="k8v4")
    document = server.ready(LETTER.read_bytes(), LETTER.name)

    def ask() -> dict[str, Any]:
        return server.ask(server.session(document["id"]), max_tokens=12)

    def restart(kv_type: str) -> None:
        server.stop()
        server.settings["kv_type"] = kv_type
        server.start()

    before = ask()
    restart("k8v8")
    other = ask()
    assert other["cache"]["miss_reason"] == "fingerprint"
    assert other["usage"]["prefilled_tokens"] > document["token_count"]
    assert server.document(document["id"])["snapshot"]["kv_type"] == "k8v8"
    restart("k8v4")
    again = ask()
    assert again["answer"] == before["answer"]
    assert (again["cache"]["source"], again["cache"]["miss_reason"]) == ("disk", None)
    assert server.engine_stat("document_prefill_tokens_total") == 0
