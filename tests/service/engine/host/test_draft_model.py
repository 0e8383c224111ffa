"""A draft model through the host: a snapshot of its own beside the main one, and the answers are those without it."""

import shutil
import time
from contextlib import contextmanager

import pytest

from cache_store.keys import SnapshotKey
from cache_store.tiers.memory import MemoryTier
from service.engine.drafts.costs import StepCosts
from service.engine.drafts.planner import DraftPlanner
from service.engine.host.draft.side import DraftSide
from service.engine.messages import DocumentRef
from tests.service.engine.draft_runner import Costs, Successor
from tests.service.engine.host import test_several_documents as several
from tests.service.engine.host.windowed import RETENTION
from tests.service.engine.host.windowed import TOKENS as LONG

SAID = list(range(260, 340))
"""What the main model answers: no token of it is in a document."""
KEY = SnapshotKey("own", "draft", "doc")


@pytest.fixture(autouse=True)
def free(monkeypatch):
    """Rows cost nothing, and a forward of the draft model next to nothing."""
    before = DraftPlanner.__init__

    def init(self, *args):
        before(self, *args)
        self.costs = Costs()

    monkeypatch.setattr(DraftPlanner, "__init__", init)


class Waiting:
    """Answers begin once the draft model follows them, so that it does not matter how fast a machine is."""

    on = True


@pytest.fixture(autouse=True)
def waiting(monkeypatch):
    before = DraftSide.following

    @contextmanager
    def following(self, request, cancel):
        with before(self, request, cancel) as follow:
            if follow is not None and Waiting.on:
                until(lambda: follow() is not None)
            yield follow

    monkeypatch.setattr(DraftSide, "following", following)
    monkeypatch.setattr(Waiting, "on", True)
    return Waiting


def start(lab, guesses=SAID, **more):
    """A host whose draft model is told the answer; the draft's runner."""
    options = more.pop("draft_options", {})
    draft = Successor(guesses, **options)
    lab.start(**({"script": SAID, "draft_tokens": 6, "draft": draft} | more))
    return draft


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def settled(lab):
    """The draft model has read what it was to read."""
    until(lambda: not lab.host._context.draft._reading._open)


def drafts(lab):
    return [name for name in lab.store.names() if name.key.kind == "draft"]


def answer(lab, **more):
    return lab.done(lab.ask(**({"max_tokens": 60, "kv_id": ""} | more)))


def plain(lab, **more):
    lab.start(script=SAID)
    lab.build(**{key: more[key] for key in ("tokens", "retention") if key in more})
    return answer(lab, **more)


def test_both_snapshots_are_made_and_after_a_restart_no_document_token_is_read_again(lab):
    expected = plain(lab)
    draft = start(lab)
    assert lab.done_build(lab.build()).already
    settled(lab)
    stats = lab.host.stats()
    assert (stats.document_prefill_tokens_total, stats.draft_document_prefill_tokens_total) == (0, len(lab.TOKENS))
    assert [(name.key, name.fingerprint_digest) for name in drafts(lab)] == [(KEY, draft.fingerprint.digest)]
    start(lab)
    done = answer(lab)
    stats = lab.host.stats()
    assert (done.token_ids, done.finish_reason) == (expected.token_ids, expected.finish_reason)
    assert (stats.document_prefill_tokens_total, stats.draft_document_prefill_tokens_total) == (0, 0)
    assert (stats.draft_misses_total, stats.draft_documents) == (0, 1)
    assert stats.draft_accepted_tokens_total == done.accepted_tokens > 30
    assert done.steps < 30
    assert stats.draft_prefilled_tokens_total >= 3  # the question


def test_a_session_goes_on_in_its_tail_and_only_what_is_new_is_fed(lab):
    draft = start(lab)
    lab.build()
    settled(lab)
    first = lab.done(lab.ask(max_tokens=30, kv_id="k1"))
    n_fed = lab.host.stats().draft_prefilled_tokens_total
    second = lab.done(lab.follow(first, "k1", max_tokens=30, kv_id=""))
    assert second.accepted_tokens > 10
    assert 0 < lab.host.stats().draft_prefilled_tokens_total - n_fed <= 12
    assert draft.n_tails == 2  # one is for probes
    lab.host.release_session("s")
    until(lambda: draft.n_tails == 1)


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


def test_a_snapshot_that_means_something_else_is_set_aside_by_its_canary(lab):
    start(lab)
    lab.build()
    settled(lab)

    def other(runner):
        tell = runner._logits
        runner._logits = lambda document, tail, token: tell(document, tail, token) + 7.0 * (tail is None)

    draft = Successor(SAID)
    other(draft)
    lab.start(script=SAID, draft_tokens=6, draft=draft)
    assert answer(lab).token_ids[3:] == SAID[:59]
    settled(lab)
    assert lab.host.stats().draft_misses_total == 1
    assert [entry.reason for entry in lab.store.entries() if entry.state == "quarantined"] == ["canary"]
    assert answer(lab).accepted_tokens > 30


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


def test_wrong_guesses_change_nothing_and_are_given_up(lab):
    wrong = [token if i % 2 else 400 for i, token in enumerate(SAID)]
    start(lab, wrong)
    lab.build()
    settled(lab)
    done = answer(lab)
    assert done.token_ids[3:] == SAID[:59]
    assert done.drafted_tokens > done.accepted_tokens


def test_several_answers_at_once_are_guessed_in_one_forward_for_each_place(lab):
    draft = start(lab, n_slots=8, draft_options={"n_slots": 8})
    lab.build()
    settled(lab)
    asked = [lab.ask_later(max_tokens=70, kv_id="", session=f"s{i}", name=f"a{i}") for i in range(3)]
    for events, future in asked:
        future.result(60)
        assert lab.done(events).token_ids[3:] == SAID[:69]
    assert any(len(batch) == 3 for batch in draft.forwards)
    assert lab.host.stats().draft_accepted_tokens_total > 60


def test_a_sampled_answer_with_a_seed_is_the_same(lab):
    told = []
    for guesses in (SAID, None):
        if guesses:
            start(lab, guesses, script=(), draft_options={"sure": 0.0})
        else:
            lab.start()
        lab.build()
        if guesses:
            settled(lab)
        done = answer(lab, temperature=1.0, seed=5)
        told.append((done.token_ids, done.finish_reason))
    assert told[0] == told[1]


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


def test_a_windowed_document_is_guessed_from_all_of_its_tokens(lab):
    more = {"tokens": LONG, "retention": RETENTION}
    expected = plain(lab, **more)
    start(lab)
    lab.build(**more)
    settled(lab)
    assert lab.host.stats().draft_document_prefill_tokens_total == len(LONG)
    start(lab)
    done = answer(lab, **more)
    assert done.token_ids == expected.token_ids
    assert done.accepted_tokens > 20
    lab.store.delete(KEY)
    start(lab)
    assert answer(lab, **more).token_ids == expected.token_ids
    settled(lab)  # read again from the snapshot of all its tokens
    assert lab.host.stats().draft_document_prefill_tokens_total == len(LONG)


def test_a_document_too_long_for_the_draft_model_and_several_together_go_without(lab):
    draft = start(lab, draft_options={"max_context": 90})
    lab.build()
    assert answer(lab).token_ids[3:] == SAID[:59]
    assert (drafts(lab), lab.host.stats().draft_misses_total) == ([], 0)
    start(lab, draft_budget=draft.document_nbytes(90))
    assert answer(lab).token_ids[3:] == SAID[:59]
    assert drafts(lab) == []
    made = several.texts()
    draft = start(lab)
    several.build(lab, made)
    settled(lab)
    assert lab.done(several.ask(lab, several.parts_of(made), max_tokens=25)).finish_reason == "length"
    assert len(drafts(lab)) == len(made)


def test_documents_leave_the_draft_models_memory_for_others(lab):
    draft = start(lab, draft_budget=Successor().document_nbytes(160))
    for name in ("doc", "other"):
        lab.build(ref=DocumentRef("own", name), name=name)
        settled(lab)
    assert (lab.host.stats().draft_documents, draft.n_documents) == (1, 1)
    for name in ("doc", "other"):
        assert answer(lab, ref=DocumentRef("own", name)).accepted_tokens > 10
    stats = lab.host.stats()
    assert (stats.draft_misses_total, stats.draft_documents) == (0, 1)


def test_without_speculation_a_draft_model_is_left_alone(lab):
    draft = start(lab, draft_tokens=0)
    lab.build()
    assert answer(lab).token_ids[3:] == SAID[:59]
    assert (draft.n_documents, draft.forwards, drafts(lab)) == (0, [], [])


def test_closing_while_a_document_is_read_keeps_what_was_read(lab):
    start(lab, draft_options={"layer_delay_s": 0.15})
    lab.build()
    until(lambda: len(list(lab.root.glob("building/*draft*/shard-*"))))
    lab.host.drain(1.0)
    lab.host.close()
    assert drafts(lab) == []
    start(lab)
    answer(lab)
    settled(lab)
    assert lab.host.stats().draft_document_prefill_tokens_total <= len(lab.TOKENS)
    assert len(drafts(lab)) == 1


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


def test_quotes_of_the_document_are_looked_up_and_not_asked_for(lab):
    start(lab, list(range(400, 480)), script=[*lab.TOKENS[20:90], *SAID])
    lab.build()
    settled(lab)
    done = answer(lab, max_tokens=70)
    assert done.token_ids[3:] == lab.TOKENS[20:89]
    assert done.accepted_tokens > 30
    assert lab.host.stats().draft_accepted_tokens_total == 0
    assert lab.host.stats().draft_steps_total < 20


def test_a_draft_model_that_takes_longer_than_the_main_one_is_left_out(lab):
    draft = start(lab, step_delay_s=0.004, draft_options={"step_delay_s": 0.02})
    lab.host._context.scheduler.planner.costs = StepCosts()
    lab.build()
    settled(lab)
    done = answer(lab, max_tokens=70)
    assert done.token_ids[3:] == SAID[:69]
    n_asked = len(draft.forwards)
    assert 4 <= n_asked < 25
    assert answer(lab, max_tokens=70).token_ids == done.token_ids
    assert len(draft.forwards) - n_asked < 10
