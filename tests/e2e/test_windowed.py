"""Documents longer than the context over a real socket, with the host and the store of the product and no model.

A token is a byte here, and a question's bytes find the passage that has the same ones.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.builds import computed_until
from tests.e2e.damage import flip, shard
from tests.e2e.server import Server, files_below
from tests.e2e.sse import events_of

CONTEXT = 4096
PAGE = "The lease of Mill House ends on the third of March. Rent is due on the first day of each month. " * 8
N_PAGES = 26
RARE = "@#~" * 24
"""Only the page it is on has such bytes, and a question of them."""
RENT = "When is rent due?"
DAMAGED = ("documents", "residents", "slots")
"""Kinds of snapshots that a windowed document has."""
KEPT = '{"sink_tokens": 16, "summary_tokens": 256, "window_tokens": 128}'


def document(n_pages: int = N_PAGES, marked: int = 9) -> bytes:
    pages = [f"Page {n}. {RARE if n == marked else ''} {PAGE}" for n in range(1, n_pages + 1)]
    return "\f".join(pages).encode()


def pages(answer: dict[str, Any], mode: str) -> set[int]:
    """Pages that an answer says it saw so."""
    parts = [part for part in answer["provenance"] if part["mode"] == mode]
    return {page for part in parts for page in range(part["first_page"], part["last_page"] + 1)}


def same_answer(answer: dict[str, Any]) -> tuple[Any, ...]:
    """What must be the same when the same is asked again."""
    return answer["answer"], answer["provenance"], answer["citations"], answer["notice"]


@pytest.fixture(scope="module")
def server(serve_all) -> Server:
    """Slow enough to be watched, and killed, while it reads."""
    return serve_all(fake={"max_context": CONTEXT, "fake_layer_s": 0.008})


@pytest.fixture(scope="module")
def hashing(serve_all, demo_model: Path) -> Server:
    """Its answers hash every byte of the KV that they build on, and its tokens are the model's."""
    fake = {"model_dir": str(demo_model), "max_context": 1536}
    return serve_all(fake=fake, answer_room_tokens=256, segment_tokens=512)


@dataclass
class Damaged:
    """A document, an answer before one kind of its snapshots was damaged, the two after, and how many of the document's
    tokens were computed for these."""

    read: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]
    again: dict[str, Any]
    n_computed: float


@dataclass
class Restarted:
    """What was answered before a stop and after the start, and what was damaged meanwhile, by the kind of snapshot.
    `n_computed`: tokens of whole documents that had been computed for the answers."""

    before: list[dict[str, Any]]
    after: list[dict[str, Any]]
    n_computed: float
    damaged: dict[str, Damaged]


@pytest.fixture(scope="module")
def restarted(hashing: Server) -> Restarted:
    server = hashing

    def ask(read: dict[str, Any]) -> dict[str, Any]:
        return server.ask(server.session(read["id"]), RARE, max_tokens=12)

    whole = server.ready(document(marked=5), retention=KEPT)
    never_stopped, stopped = (server.session(whole["id"]) for _ in range(2))
    answered = [server.ask(never_stopped, question, max_tokens=12) for question in (RARE, RENT)]
    assert server.ask(stopped, RARE, max_tokens=12)["answer"] == answered[0]["answer"]
    read = {kind: server.ready(document(marked=7 + n), retention=KEPT) for n, kind in enumerate(DAMAGED)}
    before = {kind: ask(read[kind]) for kind in DAMAGED}
    server.stop()
    for kind in DAMAGED:
        (directory,) = (server.store / "snapshots").glob(f"*/{kind}/{read[kind]['id']}/*")
        flip(shard(directory), 0.2)
    server.start()
    again = [ask(whole), server.ask(stopped, RENT, max_tokens=12)]
    n_computed, found = server.engine_stat("document_prefill_tokens_total"), {}
    for kind in DAMAGED:
        computed = server.engine_stat("document_prefill_tokens_total")
        after = ask(read[kind])
        computed = server.engine_stat("document_prefill_tokens_total") - computed
        found[kind] = Damaged(read[kind], before[kind], after, ask(read[kind]), computed)
    return Restarted(answered, again, n_computed, found)


@pytest.fixture(scope="module")
def read(server: Server) -> dict[str, Any]:
    return server.ready(document(), retention="balanced")


def test_what_stays_in_memory_does_not_grow_with_the_document(server, read):
    computed = server.engine_stat("document_prefill_tokens_total")
    longer = server.ready(document(2 * N_PAGES), retention="balanced")
    assert longer["token_count"] > 1.9 * read["token_count"] > 1.9 * 4 * CONTEXT
    shown = [body["snapshot"] for body in (read, longer)]
    assert [snapshot["retention"]["preset"] for snapshot in shown] == ["balanced", "balanced"]
    assert shown[0]["resident_tokens"] == shown[1]["resident_tokens"] == 1552
    assert shown[0]["resident_nbytes"] == shown[1]["resident_nbytes"] > 0
    assert shown[1]["index_nbytes"] > 1.9 * shown[0]["index_nbytes"]
    assert server.engine_stat("document_prefill_tokens_total") == computed + longer["token_count"]


def test_the_passage_that_a_question_needs_is_fetched_and_its_page_named(server, read):
    answer = server.ask(server.session(read["id"]), RARE, max_tokens=8)
    fetched, verbatim = pages(answer, "fetched"), pages(answer, "verbatim")
    assert 9 in fetched
    assert len(fetched) < 8
    assert N_PAGES in verbatim
    assert pages(answer, "summary") == set(range(1, N_PAGES + 1)) - fetched - verbatim
    usage = answer["usage"]
    assert usage["reused_tokens"] == usage["document_tokens"] == read["token_count"]
    assert usage["first_pass_tokens"] == usage["prefilled_tokens"]
    assert answer["timings"]["fetch_ms"] > 0


@pytest.mark.model
def test_answers_are_the_same_before_and_after_a_restart(restarted: Restarted):
    for one, other in zip(restarted.after, restarted.before, strict=True):
        assert same_answer(one) == same_answer(other)
        assert one["usage"]["prefilled_tokens"] == other["usage"]["prefilled_tokens"]
    fresh = restarted.after[0]
    assert (fresh["cache"]["source"], fresh["cache"]["miss_reason"]) == ("disk", None)
    assert restarted.n_computed == 0


@pytest.mark.model
@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_told_and_only_what_was_lost_is_made_again(restarted: Restarted, kind: str):
    damaged = restarted.damaged[kind]
    before, after, again = damaged.before, damaged.after, damaged.again
    assert same_answer(after) == same_answer(before)
    assert after["cache"]["miss_reason"] == "checksum"
    assert damaged.n_computed == (damaged.read["token_count"] if kind == "documents" else 0)
    assert after["usage"]["prefilled_tokens"] == damaged.n_computed + before["usage"]["prefilled_tokens"]
    assert (same_answer(again), again["cache"]["miss_reason"]) == (same_answer(before), None)


def test_a_build_goes_on_after_its_engine_was_killed(server):
    body = server.upload(document(marked=8), retention="balanced")
    before = server.engine_stat("document_prefill_tokens_total")
    computed = computed_until(server, body["id"], 0.5) - before
    server.kill_engine()
    server.until_engine_is_back()
    read = server.until_ended(body["id"])
    assert (read["status"], read["snapshot"]["resident_tokens"]) == ("ready", 1552)
    assert computed + read["snapshot"]["prefilled_tokens"] < read["token_count"] * 1.2
    answer = server.ask(server.session(read["id"]), RARE, max_tokens=8)
    assert 8 in pages(answer, "fetched")


def test_nothing_is_left_of_a_deleted_document(server):
    read = server.ready(document(marked=3))
    server.ask(server.session(read["id"]), RARE, max_tokens=2)
    assert [path for path in files_below(server.store) if read["id"] in path]
    removed = server.request("DELETE", f"/v1/documents/{read['id']}").json()["removed"]
    assert {part["tier"]: part["objects"] > 0 for part in removed}["disk"]
    assert [path for path in files_below(server.store) if read["id"] in path] == []


def test_its_status_only_goes_forward(server):
    document_id = server.upload(document(marked=4), retention="balanced")["id"]
    with server.client.stream("GET", f"/v1/documents/{document_id}/events") as response:
        seen = [event.data["status"] for event in events_of(response) if event.data]
    order = ["queued", "parsing", "prefilling", "compacting", "persisting", "ready"]
    assert [order.index(status) for status in seen] == sorted(order.index(status) for status in seen)
    assert {"prefilling", "compacting", "ready"} <= set(seen)
