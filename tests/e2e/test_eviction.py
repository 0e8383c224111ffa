"""A server whose disk has room for two of three documents: all of them answer, and what had left says so."""

import json

import pytest
from click.testing import CliRunner, Result

from service.cli import main
from tests.e2e.server import Server

ANSWER = [*b"All is well.", 256]
DOCUMENTS = [b"".join(b"Lot %d went to bidder %d.\n\n" % (i, n * i) for i in range(120)) for n in (3, 5, 7)]
NBYTES = 1_475_000
"""Of the snapshot of each."""


@pytest.fixture
def server(serve) -> Server:
    return serve(fake={"fake_script": ANSWER, "fake_layers": 8}, snapshot_budget_bytes=int(NBYTES * 2.5))


def snapshot(server: Server, document_id: str) -> tuple[str, list[str]]:
    body = server.document(document_id)["snapshot"]
    return body["state"], [place["tier"] for place in body["tiers"]]


def evict(server: Server, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["snapshots", "evict", *arguments], env={"PREREAD_DATA_DIR": str(server.data_dir)})


def test_documents_take_turns_on_a_small_disk(server: Server):
    ids = [server.ready(document)["id"] for document in DOCUMENTS]
    assert server.document(ids[2])["snapshot"]["nbytes"] == pytest.approx(NBYTES, rel=0.01)
    assert [snapshot(server, id) for id in ids] == [("absent", []), ("ready", ["disk"]), ("ready", ["disk"])]
    server.kill_engine()  # with what it has in memory
    server.until_engine_is_back()
    assert server.request("PATCH", f"/v1/documents/{ids[0]}", json={"pinned": True}).status_code == 200
    answers = [server.ask(server.session(id)) for id in ids]
    assert {answer["answer"] for answer in answers} == {"All is well."}
    assert answers[0]["cache"]["miss_reason"] == "evicted"
    assert answers[0]["usage"]["prefilled_tokens"] > server.document(ids[0])["token_count"]

    shown = json.loads(evict(server, "--dry-run", "--json").stdout)
    assert [(one["id"], one["why"]) for one in shown["kept"]] == [(ids[0], "pinned")]
    assert {one["kind"] for one in shown["evicted"]} == {"document", "turn"}
    evicted = evict(server, "--bytes", str(1 << 40))
    assert evicted.stdout.count(": evicted, ") == len(shown["evicted"])
    assert f"document {ids[0]}: stays (pinned)" in evicted.stdout
    assert "There is no more that may go" in evicted.stderr
    refused = evict(server)
    assert (refused.exit_code, "--bytes N" in refused.stderr) == (2, True)

    assert [snapshot(server, id)[0] for id in ids] == ["ready", "absent", "absent"]
    for document_id in ids:
        assert server.ask(server.session(document_id))["answer"] == "All is well."
    assert snapshot(server, ids[0]) == ("ready", ["disk"])
