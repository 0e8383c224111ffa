"""Documents that leave the device for host memory, and come back from there without the disk."""

import random
import threading
import time

import msgspec
import pytest

from service.engine.digests import digest_of
from service.engine.messages import AnswerDone, AnswerRequest, DocumentRef, Failed, Sampling
from service.engine.scheduler.cancel import Reason
from tests.service.engine.host.host_copies import FakeCopies
from tests.service.engine.host.windowed import MARK, RETENTION, with_mark

DOCS = [DocumentRef("own", f"d{i}") for i in range(4)]


@pytest.fixture
def tier(lab):
    """Starts an engine with room for `n` documents on the device and `n_host` in host memory."""

    def start(n=1, n_host=2, **more) -> FakeCopies:
        def prepare(runner):
            runner.tier = "gpu"
            runner.host_copies = FakeCopies(runner, 100 * n_host)

        lab.start(budget=3600 * more.get("n_layers", 2) * n, n_slots=5, prepare=prepare, **more)
        assert lab.runner.document_nbytes(100) == 3600 * more.get("n_layers", 2)
        return lab.runner.host_copies

    return start


def source(lab, ref, **more):
    """Where the document of a whole answer came from; the answer's tokens are checked against its first ones."""
    events = lab.ask(ref=ref, session=f"s-{ref.document_id}", kv_id="", name="q", **more)
    return lab.started(events).source, lab.done(events).token_ids


def settle(lab) -> None:
    lab.host._context.scheduler.run(lambda: None)


def test_documents_go_to_host_memory_and_come_back(lab, tier):
    copies = tier(n=1, n_host=2)
    lab.build(DOCS[0])
    resident, answer = source(lab, DOCS[0])
    assert resident == "gpu"
    lab.build(DOCS[1])
    assert (lab.host.stats().host_documents, lab.host.stats().host_nbytes) == (1, 7200)
    events = lab.ask(ref=DOCS[0], kv_id="")
    assert lab.started(events).source == "host"
    assert lab.started(events).restored_tokens == 100
    assert lab.done(events).token_ids == answer
    assert source(lab, DOCS[1]) == ("host", answer)
    assert lab.runner.n_documents == 1
    assert copies.n_in == 4
    assert lab.host.stats().document_references == 0


def test_a_copy_that_is_still_there_is_not_made_again(lab, tier):
    copies = tier(n=1, n_host=2)
    for ref in DOCS[:2]:
        lab.build(ref)
    for _ in range(3):
        for ref in DOCS[:2]:
            assert source(lab, ref)[0] == "host"
    assert copies.n_out == 4
    assert copies.used == 200


def test_the_least_recently_used_leaves_host_memory_for_the_disk(lab, tier):
    tier(n=1, n_host=1)
    for ref in DOCS[:3]:
        lab.build(ref)
    assert source(lab, DOCS[0])[0] == "disk"
    assert lab.host.stats().host_documents == 1
    assert source(lab, DOCS[2])[0] == "host", "what is wanted next does not give way to what leaves for it"
    assert source(lab, DOCS[0])[0] == "disk"


def test_pinned_documents_stay_while_others_can_go(lab, tier):
    tier(n=2, n_host=0)
    lab.build(DOCS[0])
    lab.host.answer(pinned_question(lab, DOCS[0]), lambda _: None).result(60)
    for ref in DOCS[1:]:
        lab.build(ref)
    assert source(lab, DOCS[1])[0] == "disk"
    resident, _ = source(lab, DOCS[0])
    assert resident == "gpu"


def test_a_pinned_document_gives_way_when_nothing_else_can(lab, tier):
    tier(n=1, n_host=0)
    lab.build(DOCS[0])
    lab.host.answer(pinned_question(lab, DOCS[0]), lambda _: None).result(60)
    lab.build(DOCS[1])
    assert source(lab, DOCS[1])[0] == "gpu"


def pinned_question(lab, ref):
    digest, sampling = digest_of(lab.TOKENS), Sampling(max_tokens=2)
    return AnswerRequest("p", "p", ref, digest, 100, [], [1, 2], sampling, "", pinned=True)


def test_deletion_takes_the_copy_too(lab, tier):
    copies = tier(n=1, n_host=2)
    for ref in DOCS[:2]:
        lab.build(ref)
    released = lab.host.release(DOCS[0])
    assert (released.objects, released.nbytes) == (1, 7200)
    assert copies.used == 0
    assert source(lab, DOCS[0])[0] == "disk"


def test_deletion_while_a_document_moves_out(lab, tier):
    copies = tier(n=1, n_host=2)
    lab.build(DOCS[0])
    copies.delay_s = 0.4
    building = threading.Thread(target=lab.build, args=(DOCS[1],))
    building.start()
    while not copies.used:
        time.sleep(0.002)
    assert lab.host.release(DOCS[0]).objects >= 1
    building.join(60)
    settle(lab)
    assert copies.used == 0
    assert lab.runner.n_documents == 1


def test_a_copy_that_is_not_complete_is_not_used(lab, tier):
    """A document is deleted and asked for again while its copy is being made: it comes from the disk."""
    copies = tier(n=2.5, n_host=2)
    lab.build(DOCS[0])
    answer = source(lab, DOCS[0])[1]
    copies.delay_s = 0.6
    building = threading.Thread(target=lab.build, args=(DOCS[1], [5] * 200))
    building.start()
    while not copies.used:
        time.sleep(0.002)
    lab.host._context.residency.drop(DOCS[0])
    assert source(lab, DOCS[0]) == ("disk", answer)
    building.join(60)


def test_who_asks_for_a_document_on_its_way_out_gets_it_back(lab, tier):
    copies = tier(n=1, n_host=2)
    lab.build(DOCS[0])
    copies.delay_s = 0.3
    building = threading.Thread(target=lab.build, args=(DOCS[1],))
    building.start()
    while not copies.used:
        time.sleep(0.002)
    assert source(lab, DOCS[0])[0] == "host"
    building.join(60)


def test_a_new_build_does_not_come_back_from_an_old_copy(lab, tier):
    copies = tier(n=1, n_host=2)
    for ref in DOCS[:2]:
        lab.build(ref)
    held = lab.host._context.host_tier._held[DOCS[0]]
    held.memory[0][0][:] = 0
    (shard,) = [s for s in lab.shards() if "/d0/" in str(s)]
    shard.unlink()
    lab.build(DOCS[0])
    lab.build(DOCS[2])
    assert source(lab, DOCS[0])[0] == "host"
    assert copies.used <= 200


def test_a_damaged_copy_is_found_by_the_canary_and_never_answers(lab, tier):
    copies = tier(n=1, n_host=2)
    lab.build(DOCS[0])
    answer = source(lab, DOCS[0])[1]
    lab.build(DOCS[1])
    lab.host._context.host_tier._held[DOCS[0]].memory[0][1][:, 50] ^= 0x10
    failed = lab.failed(lab.ask(ref=DOCS[0], kv_id=""))
    assert (failed.code, failed.miss_reason) == ("snapshot_miss", "canary")
    lab.build(DOCS[0])
    assert source(lab, DOCS[0])[1] == answer
    assert copies.used <= 200


def test_a_copy_out_that_fails_only_costs_the_copy(lab, tier):
    copies = tier(n=1, n_host=2)
    lab.build(DOCS[0])
    copies.fail_out = 1
    lab.build(DOCS[1])
    assert source(lab, DOCS[1])[0] == "gpu"
    copies.fail_out = -1
    assert copies.used == 0
    assert source(lab, DOCS[0])[0] == "disk"
    assert lab.runner.n_documents == 1


def test_a_copy_in_that_fails_leaves_nothing_behind(lab, tier):
    copies = tier(n=1, n_host=2)
    for ref in DOCS[:2]:
        lab.build(ref)
    copies.fail_in = copies.n_in + 1
    assert "a copy in failed" in lab.failed(lab.ask(ref=DOCS[0], kv_id="")).detail
    settle(lab)
    assert lab.runner.n_documents == 0
    copies.fail_in = -1
    assert source(lab, DOCS[0])[0] == "host"


def test_a_cancelled_return_leaves_nothing_behind(lab, tier):
    copies = tier(n=1, n_host=2, n_layers=8)
    for ref in DOCS[:2]:
        lab.build(ref)
    answer = source(lab, DOCS[0])[1]
    assert source(lab, DOCS[1])[0] == "host"
    copies.delay_s = 0.15
    before = copies.n_in
    events, future = lab.ask_later(ref=DOCS[0], name="returning", session="r", kv_id="")
    while copies.n_in == before:
        time.sleep(0.002)
        assert not future.done()
    lab.host.cancel("returning")
    future.result(60)
    assert lab.failed(events).code == "cancelled"
    assert copies.n_in < before + 8
    settle(lab)
    assert lab.runner.n_documents == 0
    assert source(lab, DOCS[0]) == ("host", answer)


def test_nothing_leaks_when_many_documents_cycle_with_cancels(lab, tier):
    copies = tier(n=2, n_host=2)
    for ref in DOCS:
        lab.build(ref)
    choose, asked = random.Random(7), []
    for i in range(200):
        ref = choose.choice(DOCS)
        asked.append(lab.ask_later([1 + i % 200], ref=ref, name=f"a{i}", session=f"s{i % 5}", kv_id="", max_tokens=2))
        if choose.random() < 0.3:
            lab.host.cancel(f"a{choose.randrange(max(0, i - 6), i + 1)}", choose.choice(list(Reason)))
        if i % 6 == 5:
            for _, future in asked[-6:]:
                future.result(60)
    for _, future in asked:
        future.result(60)
    assert all(isinstance(events[-1], AnswerDone | Failed) for events, _ in asked)
    assert {e[-1].code for e, _ in asked if isinstance(e[-1], Failed)} <= {"cancelled"}
    settle(lab)
    residency = lab.host._context.residency
    assert lab.host.stats().document_references == 0
    assert lab.runner.n_documents == residency.n_documents <= 2
    assert residency.nbytes == 7200 * residency.n_documents
    assert copies.used == 100 * lab.host.stats().host_documents <= 200
    lab.host.close()
    assert copies.closed


def test_rows_of_a_windowed_document_come_back_to_their_positions(lab):
    tokens = with_mark(530)
    retention = msgspec.structs.replace(RETENTION, summary_tokens=0, window_tokens=64)  # slots would leave uncopied
    n_rows = retention.sink_tokens + retention.window_tokens

    def prepare(runner):
        runner.tier = "gpu"
        runner.host_copies = FakeCopies(runner, 200)

    lab.start(budget=3600 * 6, n_slots=5, prepare=prepare)
    room = lab.host.info.resident_tokens
    assert 264 <= room < 2 * 264
    lab.build(tokens=tokens, retention=retention)
    question = {"tokens": tokens, "retention": retention, "prompt": (MARK, 1), "session": "s", "kv_id": "k"}
    first = lab.ask(**question)
    lab.build(DOCS[0], tokens=list(range(250)))
    assert lab.host.stats().host_documents == 1
    lab.host.release_session("s")
    again = lab.ask(**question)
    assert (lab.started(again).source, lab.started(again).restored_tokens) == ("host", n_rows)
    assert lab.started(again).spans == lab.started(first).spans
    assert lab.done(again).token_ids == lab.done(first).token_ids
