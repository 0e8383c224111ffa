"""What can go wrong with a draft model and its snapshots: answers go on without, what was deleted leaves nothing."""

import shutil
import threading
import time
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

from cache_store.errors import StorageFailed
from cache_store.keys import SnapshotKey
from cache_store.tiers.memory import MemoryTier
from service.engine.digests import digest_of
from service.engine.host.draft import reading as draft_reading
from service.engine.host.draft.reading import Reading
from service.engine.host.kept import Subject
from service.engine.messages import DocumentRef
from service.engine.scheduler.cancel import Cancelled, CancelToken
from tests.service.engine.draft_runner import Successor
from tests.service.engine.host.draft_host import KEY, SAID, answer, drafts, settled, start, until

pytestmark = pytest.mark.usefixtures("free_drafts", "waiting")


@pytest.mark.parametrize("harm", ["missing", "cut", "flipped", "foreign"])
def test_what_is_wrong_with_a_snapshot_is_a_miss_and_the_document_is_read_in_the_background(lab, harm, waiting):
    start(lab)
    lab.build()
    settled(lab)
    lab.host.close()
    [shard] = lab.shards("drafts")
    options = {}
    if harm == "missing":
        lab.store.delete(KEY)
    elif harm == "cut":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif harm == "flipped":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    else:
        options = {"weights": "other draft"}
    start(lab, draft_options=options)
    waiting.on = False
    done = answer(lab)
    waiting.on = True
    assert done.token_ids[3:] == SAID[:59]
    until(lambda: lab.host.stats().draft_misses_total == 1)
    settled(lab)
    assert lab.host.stats().draft_document_prefill_tokens_total == len(lab.TOKENS)
    again = answer(lab)
    assert (again.token_ids, lab.host.stats().draft_misses_total) == (done.token_ids, 1)
    assert again.accepted_tokens > 30
    start(lab, draft_options=options)
    assert answer(lab).accepted_tokens > 30
    assert lab.host.stats().draft_document_prefill_tokens_total == 0


def start_with_another_meaning(lab):
    """Of the draft model's snapshot that was made before."""
    start(lab)
    lab.build()
    settled(lab)
    draft = Successor(SAID)
    tell = draft._logits
    draft._logits = lambda document, tail, token: tell(document, tail, token) + 7.0 * (tail is None)
    lab.start(script=SAID, draft_tokens=6, draft=draft)


def test_a_snapshot_that_means_something_else_is_set_aside_by_its_canary(lab, caplog):
    caplog.set_level("INFO")
    start_with_another_meaning(lab)
    assert answer(lab).token_ids[3:] == SAID[:59]
    settled(lab)
    assert lab.host.stats().draft_misses_total == 1
    assert [entry.reason for entry in lab.store.entries() if entry.state == "quarantined"] == ["canary"]
    assert len([r for r in caplog.records if "is a miss (canary): a logit" in r.message]) == 1
    assert answer(lab).accepted_tokens > 30


def test_one_that_cannot_be_set_aside_is_told_of_and_the_answer_goes_on_without(lab, waiting, monkeypatch, caplog):
    caplog.set_level("INFO")
    start_with_another_meaning(lab)
    waiting.on = False
    monkeypatch.setattr(lab.store, "quarantine", Mock(side_effect=StorageFailed("no space left on device")))
    done = answer(lab)
    assert (done.token_ids[3:], done.accepted_tokens) == (SAID[:59], 0)
    until(lambda: any("without the draft model: no space left" in r.message for r in caplog.records))
    assert lab.host.stats().draft_misses_total == 1


def test_deleting_a_document_removes_both_from_disk_and_memory(lab):
    draft = start(lab)
    lab.build()
    settled(lab)
    answer(lab)
    assert lab.host.stats().draft_nbytes > 0
    lab.host.release(lab.DOC)
    lab.store.delete(SnapshotKey("own", "document", "doc"))
    stats = lab.host.stats()
    assert (stats.draft_documents, stats.draft_nbytes, draft.n_documents, draft.n_tails) == (0, 0, 0, 1)
    assert lab.store.names() == []


def test_a_document_that_is_deleted_while_the_draft_model_reads_it_leaves_nothing(lab):
    draft = start(lab, draft_options={"layer_delay_s": 0.1})
    lab.build()
    until(lambda: draft.n_documents)
    lab.host.release(lab.DOC)
    lab.store.delete(SnapshotKey("own", "document", "doc"))
    settled(lab)
    assert lab.store.names() == []
    until(lambda: not draft.n_documents)


def test_one_that_was_deleted_behind_its_back_is_not_left_behind(lab):
    draft = start(lab, draft_options={"layer_delay_s": 0.1})
    lab.build()
    until(lambda: draft.n_documents)
    lab.store.delete(SnapshotKey("own", "document", "doc"))  # by another process
    settled(lab)
    assert lab.store.names() == []


def test_a_fault_ends_guessing_for_that_answer_only(lab):
    draft = start(lab)
    lab.build()
    settled(lab)
    draft.fails = True
    done = answer(lab)
    assert (done.token_ids[3:], done.accepted_tokens) == (SAID[:59], 0)
    draft.fails = False
    again = answer(lab)
    assert again.token_ids == done.token_ids
    assert again.accepted_tokens > 30
    draft.poisoned = {SAID[4]}
    done = answer(lab)
    assert done.token_ids == again.token_ids
    assert done.accepted_tokens < 10
    draft.poisoned = set()
    assert answer(lab).accepted_tokens > 30


def test_an_answer_that_cannot_be_followed_goes_on_without(lab, waiting, monkeypatch):
    start(lab)
    lab.build()
    settled(lab)
    waiting.on = False

    def refuse(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(lab.host._context.draft._pool, "submit", refuse)
        done = answer(lab)
    assert (done.token_ids[3:], done.accepted_tokens) == (SAID[:59], 0)
    waiting.on = True
    again = answer(lab)
    assert (again.token_ids, again.accepted_tokens > 30) == (done.token_ids, True)


def test_a_document_is_left_to_be_read_without_a_new_thread(monkeypatch):
    reading = Reading(None, None)  # it can read nothing
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    subject = Subject(DocumentRef("own", "doc"), "digest", 3, kind="draft")
    assert reading.want(subject, subject, [1, 2, 3]).result(20) is False
    monkeypatch.undo()
    reading.close()


def test_cancelling_ends_an_answer_that_is_guessed(lab):
    draft = start(lab, step_delay_s=0.02)
    lab.build()
    settled(lab)
    events, future = lab.ask_later(max_tokens=70, kv_id="")
    until(lambda: lab.host.stats().draft_accepted_tokens_total)
    lab.host.cancel("a")
    future.result(60)
    assert lab.done(events).finish_reason == "cancelled"
    until(lambda: len(lab.host._context.draft._seats._idle) == 1)
    assert draft.n_tails == 2


def test_a_fault_while_an_answer_is_cancelled_leaves_no_tail_of_unknown_rows(lab):
    draft = start(lab)
    lab.build()
    settled(lab)
    forward = draft.forward

    def fail(batch):
        found = forward(batch)
        if len(draft.forwards) > 3:
            lab.host.cancel("a")
            time.sleep(0.2)  # the answer's thread sees that
            raise RuntimeError("the draft model is out of memory")
        return found

    draft.forward = fail
    events, future = lab.ask_later(max_tokens=70, kv_id="")
    future.result(60)
    assert lab.done(events).finish_reason == "cancelled"
    until(lambda: not lab.host._context.draft._seats._taken)
    assert (draft.n_tails, len(lab.host._context.draft._seats._idle)) == (1, 0)


def test_closing_while_a_document_is_read_leaves_nothing_of_it_and_it_is_read_again(lab):
    start(lab, draft_options={"layer_delay_s": 0.15})
    lab.build()
    until(lambda: len(list(lab.root.glob("building/*draft*/shard-*"))))
    lab.host.drain(1.0)
    lab.host.close()
    assert [entry.name.key.kind for entry in lab.store.entries()] == ["document"]
    start(lab)
    answer(lab)
    settled(lab)
    assert lab.host.stats().draft_document_prefill_tokens_total == len(lab.TOKENS)
    assert len(drafts(lab)) == 1


def test_no_document_is_begun_while_the_engine_drains(lab, waiting):
    start(lab)
    lab.build()
    settled(lab)
    lab.store.delete(KEY)
    start(lab)
    waiting.on = False
    lab.host._context.draft.drain()
    assert answer(lab).token_ids[3:] == SAID[:59]
    until(lambda: lab.host.stats().draft_misses_total == 1)
    time.sleep(0.1)
    settled(lab)
    assert (lab.host.stats().draft_document_prefill_tokens_total, drafts(lab)) == (0, [])


def test_after_the_loss_of_its_host_both_come_back_from_a_far_tier(lab):
    tiers = [MemoryTier("object", durable=True)]
    start(lab, tiers=tiers)
    lab.build()
    settled(lab)
    lab.store.uploader.send_noted()
    lab.host.close()
    shutil.rmtree(lab.root)
    start(lab, tiers=tiers)
    events = lab.ask(max_tokens=60, kv_id="")
    assert lab.started(events).source == "object"
    assert lab.done(events).accepted_tokens > 30
    stats = lab.host.stats()
    assert (stats.document_prefill_tokens_total, stats.draft_document_prefill_tokens_total) == (0, 0)
    lab.host.release(lab.DOC)
    lab.store.delete(SnapshotKey("own", "document", "doc"))
    assert list(tiers[0].entries()) == []


def test_without_room_on_the_disk_answers_go_on_without_and_it_is_not_tried_at_every_question(lab, waiting, caplog):
    waiting.on = False
    lab.start(script=SAID)
    lab.build()
    start(lab, disk=lab.store.usage() + 100)
    lab.build()
    settled(lab)
    for _ in range(3):
        assert answer(lab).token_ids[3:] == SAID[:59]
        settled(lab)
    assert [name.key.kind for name in lab.store.names()] == ["document"]
    assert len([r for r in caplog.records if "the draft model has not read" in r.message]) == 1


@contextmanager
def in_use(lab):
    """The document is in the draft model's memory, as while an answer is guessed."""
    residency = lab.host._context.draft.context.residency
    with residency.held(lab.DOC, digest_of(lab.TOKENS), len(lab.TOKENS), Mock(), CancelToken()) as (_, mine):
        assert not mine
        yield


def test_a_document_that_finds_no_room_goes_behind_the_others_and_takes_no_disk_meanwhile(lab, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(draft_reading, "ROOM_S", 0.02)
    start(lab, draft_budget=Successor().document_nbytes(160))
    lab.build()
    settled(lab)
    with in_use(lab):
        lab.build(ref=DocumentRef("own", "other"), name="other")
        lab.build(ref=DocumentRef("own", "short"), name="short", tokens=lab.TOKENS[:40])
        until(lambda: len(drafts(lab)) == 2)
        time.sleep(0.1)
        assert {name.key.id for name in drafts(lab)} == {"doc", "short"}
        assert not list(lab.root.glob("building/*draft*"))
        assert lab.host.stats().draft_documents == 2  # what nobody uses stays where that would not be enough
    settled(lab)
    assert len(drafts(lab)) == 3
    assert len([r for r in caplog.records if "has not read a document yet" in r.message]) == 1


@pytest.mark.parametrize("end", ["release", "close"])
def test_a_document_that_waits_for_room_is_given_up_when_it_is_deleted_or_the_engine_ends(lab, monkeypatch, end):
    monkeypatch.setattr(draft_reading, "ROOM_S", 60.0)
    start(lab, draft_budget=Successor().document_nbytes(160))
    lab.build()
    settled(lab)
    other = DocumentRef("own", "other")
    with in_use(lab):
        lab.build(ref=other, name="other")
        until(lambda: lab.host._context.draft._reading._open[other].again_s)
        if end == "release":
            lab.host.release(other)
            settled(lab)
    lab.host.close()
    assert [name.key.id for name in drafts(lab)] == ["doc"]


def test_what_waits_for_room_again_after_a_miss_ends_with_the_answer(lab, waiting, monkeypatch):
    start(lab)
    lab.build()
    settled(lab)
    lab.store.delete(KEY)
    start(lab, step_delay_s=0.05)
    waiting.on = False
    side = lab.host._context.draft
    held, waits, over = side.context.residency.held, threading.Event(), threading.Event()

    def no_room(*arguments, **options):
        if not drafts(lab) or options.get("fresh"):
            return held(*arguments, **options)
        with arguments[4].calling(over.set):
            waits.set()
            assert over.wait(20)
        raise Cancelled

    monkeypatch.setattr(side.context.residency, "held", no_room)
    events, future = lab.ask_later(max_tokens=70, kv_id="")
    until(waits.is_set)
    assert not over.is_set()
    lab.host.cancel("a")
    future.result(60)
    assert lab.done(events).finish_reason == "cancelled"
    assert over.wait(5)
