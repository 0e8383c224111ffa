"""Builds and answers over a real snapshot store and a runner without a model."""

import os
import random
import threading
import time

import pytest

from cache_store.keys import SnapshotKey
from cache_store.store import SnapshotStore
from service.engine.digests import digest_of
from service.engine.fake_runner import FakeRunner
from service.engine.host.host import EngineHost
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerStarted,
    AnswerText,
    BuildDone,
    BuildProgress,
    BuildRequest,
    DocumentRef,
    Failed,
    Sampling,
    TurnRef,
)
from service.engine.scheduler.cancel import Reason

DOC = DocumentRef("own", "doc")
TOKENS = [7 * i % 251 for i in range(100)]
BIG = 1 << 30


class Words:
    """Each id is a word."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{i}>" for i in ids)


class Lab:
    """One engine process after another on one snapshot directory."""

    def __init__(self, root) -> None:
        self.root = root
        self.hosts: list[EngineHost] = []

    def start(self, *, budget=BIG, disk=None, end_ids=(), max_batch=None, **more) -> EngineHost:
        more.setdefault("n_slots", 4)
        self.runner = FakeRunner(block_tokens=8, chunk_tokens=16, **more)
        self.store = SnapshotStore(self.root, budget_nbytes=disk, free_floor_nbytes=0)
        self.host = EngineHost(
            self.runner,
            self.store,
            Words(),
            frozenset(end_ids),
            resident_budget_nbytes=budget,
            max_batch=max_batch,
            engine="fake",
        )
        self.hosts.append(self.host)
        return self.host

    def build(self, ref=DOC, tokens=TOKENS, name="b"):
        events: list = []
        self.host.build(BuildRequest(name, ref, list(tokens)), events.append).result(30)
        return events

    def ask(self, prompt=(1, 2, 3), turns=(), **more):
        events, future = self.ask_later(prompt, turns, **more)
        future.result(30)
        return events

    def ask_later(self, prompt=(1, 2, 3), turns=(), **more):
        events: list = []
        ref, tokens = more.pop("ref", DOC), more.pop("tokens", TOKENS)
        name = more.pop("name", "a")
        session, kv_id = more.pop("session", "s"), more.pop("kv_id", "kv1")
        more.setdefault("max_tokens", 5)
        sampling = Sampling(**more)
        request = AnswerRequest(
            name, session, ref, digest_of(tokens), len(tokens), list(turns), list(prompt), sampling, kv_id
        )
        return events, self.host.answer(request, events.append)

    def follow(self, done: AnswerDone, after="kv1", before=(), **more):
        turns = [*before, TurnRef(after, done.token_ids)]
        return self.ask([*done.pending_ids, 8, 9], turns, **({"kv_id": "kv2"} | more))

    def shards(self, kind="documents"):
        return sorted(self.root.glob(f"snapshots/own/{kind}/*/*/shard-*"))


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path / "cache")
    yield lab
    for host in lab.hosts:
        host.close()


def done(events) -> AnswerDone:
    assert isinstance(events[-1], AnswerDone), events[-1]
    return events[-1]


def started(events) -> AnswerStarted:
    assert isinstance(events[0], AnswerStarted), events[0]
    return events[0]


def failed(events) -> Failed:
    assert isinstance(events[-1], Failed), events[-1]
    return events[-1]


def test_build_then_answer_then_answer_after_a_restart(lab):
    lab.start()
    events = lab.build()
    assert isinstance(events[-1], BuildDone)
    assert (events[-1].prefilled_tokens, events[-1].resumed_tokens, events[-1].n_blocks) == (100, 0, 13)
    progress = [e.done for e in events if isinstance(e, BuildProgress) and e.stage == "prefilling"]
    assert progress == [*range(8, 100, 8), 100]
    first = lab.ask(kv_id="")
    assert (started(first).source, started(first).restored_tokens) == ("host", 0)
    lab.host.close()
    lab.start()
    second = lab.ask(kv_id="")
    assert (started(second).source, started(second).restored_tokens) == ("disk", 100)
    assert (started(second).reused_tokens, started(second).prefilled_tokens) == (100, 3)
    assert done(second).token_ids == done(first).token_ids
    assert done(second).engine_prefilled_tokens == 3
    assert lab.host.stats().prefilled_tokens_total == 3
    assert lab.host.stats().document_prefill_tokens_total == 0


def test_answers_stream_text_and_account_for_every_token(lab):
    lab.start(script=[10, 11, 12, 13], end_ids=[13])
    lab.build()
    events = lab.ask(max_tokens=50)
    assert "".join(e.text for e in events if isinstance(e, AnswerText)) == "<10><11><12>"
    assert done(events).finish_reason == "stop"
    assert done(events).token_ids == [1, 2, 3, 10, 11, 12]
    assert done(events).pending_ids == [13]
    assert done(events).completion_tokens == 4
    assert done(events).kv_stored
    assert done(lab.ask(stop=("<12>",), session="s2")).finish_reason == "stop"


def test_a_second_build_finds_the_snapshot(lab):
    lab.start()
    lab.build()
    again = lab.build()
    assert isinstance(again[-1], BuildDone)
    assert (again[-1].already, again[-1].prefilled_tokens) == (True, 0)


def test_follow_ups_equal_before_and_after_a_restart(lab):
    answers = []
    for restart, session in ((False, "stayed"), (True, "restarted")):
        lab.start()
        lab.build()
        first = done(lab.ask(session=session, kv_id=f"{session}1"))
        if restart:
            lab.host.close()
            lab.start()
        events = lab.follow(first, f"{session}1", session=session, kv_id=f"{session}2")
        assert started(events).reused_tokens == 100 + len(first.token_ids)
        assert (started(events).prefilled_tokens, started(events).miss_reason) == (3, None)
        before = [TurnRef(f"{session}1", first.token_ids)]
        third = lab.follow(done(events), f"{session}2", before, session=session, kv_id=f"{session}3")
        answers.append((done(events).token_ids, done(third).token_ids))
        lab.host.close()
    assert answers[0] == answers[1]


def test_an_idle_tail_gives_way_and_comes_back_from_disk(lab):
    lab.start(n_slots=2)
    lab.build()
    first = done(lab.ask(session="s1", kv_id="k1"))
    stayed = done(lab.follow(first, "k1", session="s1", kv_id="k2"))
    lab.ask(session="other", kv_id="")
    assert lab.host.stats().tail_slots_used == 1
    events = lab.follow(first, "k1", session="s1", kv_id="k2")
    assert started(events).restored_tokens == len(first.token_ids)
    assert done(events).token_ids == stayed.token_ids


def test_forked_sessions_share_their_turns_and_go_on_alike(lab):
    lab.start()
    lab.build()
    first = done(lab.ask(session="s1"))
    a = lab.follow(first, session="s1", kv_id="ka")
    b = lab.follow(first, session="fork", kv_id="kb")
    assert done(a).token_ids == done(b).token_ids
    assert started(b).reused_tokens == started(a).reused_tokens


def test_a_retried_turn_cuts_the_tail_back(lab):
    lab.start()
    lab.build()
    first = done(lab.ask())
    once = lab.follow(first)
    twice = lab.follow(first)
    assert done(once).token_ids == done(twice).token_ids
    assert started(twice).restored_tokens == 0


@pytest.mark.parametrize("damage", ["flip", "remove", "unsaved"])
def test_a_lost_turn_is_computed_again(lab, damage):
    lab.start()
    lab.build()
    first = done(lab.ask())
    second = done(lab.follow(first))
    turns = [TurnRef("kv1", first.token_ids), TurnRef("kv2", second.token_ids)]
    expected = done(lab.ask([*second.pending_ids, 5], turns, kv_id="kv3"))
    lab.host.close()
    shard = next(s for s in lab.shards("turns") if "kv1" in str(s))
    if damage == "flip":
        data = bytearray(shard.read_bytes())
        data[-3] ^= 1
        shard.write_bytes(data)
    elif damage == "remove":
        shard.unlink()
    else:
        turns[0] = TurnRef("", first.token_ids)
    lab.start()
    events = lab.ask([*second.pending_ids, 5], turns, kv_id="kv4")
    reason = {"flip": "checksum", "remove": "truncated", "unsaved": "absent"}[damage]
    n_lost = len(first.token_ids) + len(second.token_ids)
    assert started(events).miss_reason == reason
    assert (started(events).reused_tokens, started(events).prefilled_tokens) == (100, n_lost + 2)
    assert done(events).engine_prefilled_tokens == n_lost + 2
    assert done(events).token_ids == expected.token_ids
    assert started(lab.ask([1], turns[:1], session="x", kv_id="")).miss_reason in (None, "absent")


@pytest.mark.parametrize("where", [0, 40, -1])
def test_a_damaged_snapshot_is_a_miss_and_a_rebuild_heals_it(lab, where):
    lab.start()
    lab.build()
    expected = done(lab.ask(kv_id=""))
    lab.host.close()
    shard = lab.shards()[0]
    data = bytearray(shard.read_bytes())
    data[where] ^= 1
    shard.write_bytes(data)
    lab.start()
    events = lab.ask(kv_id="")
    assert (failed(events).code, failed(events).miss_reason) == ("snapshot_miss", "checksum")
    assert len(events) == 1
    assert failed(lab.ask(kv_id="")).miss_reason in ("checksum", "absent")
    lab.build()
    assert done(lab.ask(kv_id="")).token_ids == expected.token_ids
    assert lab.runner.n_documents == lab.host.stats().resident_documents == 1


def test_a_canary_that_disagrees_is_a_miss_without_a_token(lab):
    lab.start()
    lab.build()
    lab.host.close()
    lab.start()
    honest = lab.runner._logits
    lab.runner._logits = lambda *a: honest(*a) + 1  # the same bytes, other numerics
    for session, turns in (("s1", ()), ("s2", ())):
        events = lab.ask(session=session, turns=turns)
        assert failed(events).code == "snapshot_miss"
        assert not [e for e in events if isinstance(e, AnswerText)]
        if failed(events).miss_reason == "canary":
            break
    assert failed(events).miss_reason == "canary"
    assert failed(lab.ask()).miss_reason != "canary"
    assert lab.host.stats().resident_documents == 0


def test_the_canary_is_checked_before_a_session_that_goes_on_after_a_restart(lab):
    lab.start()
    lab.build()
    first = done(lab.ask())
    lab.host.close()
    lab.start()
    honest = lab.runner._logits
    lab.runner._logits = lambda *a: honest(*a) + 1
    events = lab.follow(first)
    assert failed(events).miss_reason == "canary"


def test_an_absent_snapshot_and_other_tokens_are_misses(lab):
    lab.start()
    assert failed(lab.ask()).miss_reason == "absent"
    lab.build()
    assert failed(lab.ask(tokens=[*TOKENS, 1])).code == "snapshot_miss"
    lab.build()
    assert done(lab.ask(session="s2")).finish_reason == "length"


def test_questions_at_once_cause_one_restore(lab):
    lab.start()
    lab.build()
    lab.host.close()
    lab.start(step_delay_s=0.005, n_slots=5)
    asked = [lab.ask_later(name=f"a{i}", session=f"s{i}", kv_id="") for i in range(4)]
    for _, future in asked:
        future.result(30)
    assert sorted(started(e).restored_tokens for e, _ in asked) == [0, 0, 0, 100]
    assert len({tuple(done(e).token_ids) for e, _ in asked}) == 1


def test_too_long_a_question_is_refused_with_the_numbers(lab):
    lab.start(tail_tokens=20, max_context=110)
    lab.build()
    refusal = failed(lab.ask(range(1, 12)))
    assert refusal.code == "too_long"
    assert "11 tokens" in refusal.detail
    assert "room for 9" in refusal.detail
    events = lab.ask([1] * 7, max_tokens=500)
    assert (done(events).finish_reason, done(events).completion_tokens) == ("length", 3)
    assert failed(lab.ask(max_tokens=0)).code == "internal"


def test_nan_is_a_failure_and_frees_everything(lab):
    lab.start()
    lab.build()
    lab.runner.poisoned.add(99)
    assert failed(lab.ask([1, 99])).code == "internal"
    stats = lab.host.stats()
    assert (stats.tail_slots_used, stats.document_references, stats.running) == (0, 0, 0)


def test_cancel_while_answering_keeps_the_turn(lab):
    lab.start(step_delay_s=0.005)
    lab.build()
    events, future = lab.ask_later(max_tokens=400)
    while len(events) < 4:
        time.sleep(0.002)
    lab.host.cancel("a")
    future.result(10)
    assert done(events).finish_reason == "cancelled"
    assert done(events).kv_stored
    lab.runner.step_delay_s = 0
    assert done(lab.follow(done(events))).finish_reason == "length"


def test_cancel_while_waiting_for_a_place(lab):
    lab.start(step_delay_s=0.005, n_slots=2)
    lab.build()
    running, first = lab.ask_later(max_tokens=400)
    while not running:
        time.sleep(0.002)
    waiting, second = lab.ask_later(name="w", session="s2")
    while not lab.host.stats().waiting:
        time.sleep(0.002)
    lab.host.cancel("w")
    second.result(10)
    assert failed(waiting).code == "cancelled"
    lab.host.cancel("a")
    first.result(10)


def test_places_are_given_in_order_of_arrival(lab):
    lab.start(step_delay_s=0.002, n_slots=2)
    lab.build()
    order: list[str] = []
    futures = []
    for i in range(8):
        _, future = lab.ask_later(name=f"a{i}", session=f"s{i}", kv_id="", max_tokens=3)
        future.add_done_callback(lambda _, i=i: order.append(f"a{i}"))
        futures.append(future)
        while lab.host.stats().waiting + lab.host.stats().running < 1 and not future.done():
            time.sleep(0.001)
        time.sleep(0.002)
    for future in futures:
        future.result(10)
    assert order == [f"a{i}" for i in range(8)]


def test_release_ends_answers_and_frees_the_document(lab):
    lab.start(step_delay_s=0.005)
    lab.build()
    events, future = lab.ask_later(max_tokens=400)
    while len(events) < 3:
        time.sleep(0.002)
    released = lab.host.release(DOC)
    future.result(10)
    assert released.objects == 1
    assert released.nbytes > 0
    assert failed(events).code == "cancelled"
    assert not lab.shards("turns")
    lab.host._context.scheduler.run(lambda: None)
    assert lab.runner.n_documents == 0
    assert lab.host.stats().tail_slots_used == 0
    assert lab.host.release(DOC).objects == 0


def test_the_memory_budget_evicts_the_least_recently_used(lab):
    lab.start()
    token = lab.host._context.residency._token_nbytes
    lab.host.close()
    lab.start(budget=token * 250)
    docs = [DocumentRef("own", f"d{i}") for i in range(3)]
    for ref in docs:
        lab.build(ref)
    assert lab.host.stats().resident_documents == 2
    assert lab.host.stats().resident_nbytes <= token * 250
    assert started(lab.ask(ref=docs[1], session="s1", kv_id="")).source == "host"
    assert started(lab.ask(ref=docs[0], session="s0", kv_id="")).source == "disk"
    assert started(lab.ask(ref=docs[1], session="s1", kv_id="")).source == "host"
    assert lab.runner.n_documents == 2
    large = DocumentRef("own", "large")
    assert failed(lab.build(large, [1] * 300)).code == "too_long"


def test_a_document_in_use_is_not_evicted_the_next_one_waits(lab):
    lab.start()
    token = lab.host._context.residency._token_nbytes
    lab.host.close()
    lab.start(budget=token * 150, step_delay_s=0.005)
    other = DocumentRef("own", "other")
    lab.build()
    events, future = lab.ask_later(max_tokens=60)
    while not events:
        time.sleep(0.002)
    built = threading.Thread(target=lab.build, args=(other,))
    built.start()
    future.result(10)
    assert done(events).finish_reason == "length"
    built.join(10)
    assert lab.host.stats().resident_documents == 1


def test_a_build_killed_by_close_goes_on_from_its_journal_with_equal_bytes(lab):
    lab.start()
    lab.build()
    whole = [s.read_bytes() for s in lab.shards()]
    lab.store.delete(SnapshotKey("own", "document", "doc"))
    lab.host.close()
    lab.start(layer_delay_s=0.01)
    events: list = []
    future = lab.host.build(BuildRequest("b", DOC, TOKENS), events.append)
    while len(events) < 5:
        time.sleep(0.002)
    lab.host.close()
    future.result(10)
    assert failed(events).retryable
    lab.start()
    again = lab.build()
    assert isinstance(again[-1], BuildDone)
    assert again[-1].resumed_tokens >= 32
    assert again[-1].resumed_tokens + again[-1].prefilled_tokens == 100
    assert [s.read_bytes() for s in lab.shards()] == whole


@pytest.mark.parametrize(("drain", "kept"), [(False, False), (True, True)])
def test_a_cancelled_build_is_given_up_but_a_drained_one_is_kept(lab, drain, kept):
    lab.start(layer_delay_s=0.01)
    events: list = []
    future = lab.host.build(BuildRequest("b", DOC, TOKENS), events.append)
    while len(events) < 5:
        time.sleep(0.002)
    if drain:
        lab.host.drain(5)
    else:
        lab.host.cancel("b")
    future.result(10)
    assert failed(events).code == "cancelled"
    assert bool(list((lab.root / "building").rglob("*"))) == kept
    lab.host._context.scheduler.run(lambda: None)
    assert lab.runner.n_documents == 0


def test_drain_ends_answers_with_what_they_have_and_refuses_new_ones(lab):
    lab.start(step_delay_s=0.005)
    lab.build()
    events, future = lab.ask_later(max_tokens=900)
    while len(events) < 3:
        time.sleep(0.002)
    lab.host.drain(0.4)
    future.result(10)
    assert (done(events).finish_reason, done(events).kv_stored) == ("cancelled", True)
    refusal = failed(lab.ask())
    assert (refusal.code, refusal.retryable) == ("busy", True)


def test_a_full_disk_fails_the_build_but_not_an_answer(lab):
    lab.start()
    lab.build()
    used = lab.store.usage()
    lab.host.close()
    lab.start(disk=used + 10)
    assert failed(lab.build(DocumentRef("own", "more"))).code == "storage"
    events = lab.ask()
    assert done(events).finish_reason == "length"
    assert not done(events).kv_stored
    assert done(lab.follow(done(events))).finish_reason == "length"


def test_nothing_leaks_over_300_questions_with_random_cancels(lab):
    lab.start(n_slots=4)
    docs = [DocumentRef("own", f"d{i}") for i in range(3)]
    for ref in docs:
        lab.build(ref)
    choose, asked = random.Random(3), []
    n_files = len(os.listdir("/proc/self/fd"))
    for i in range(300):
        prompt = [1 + choose.randrange(200)] * choose.randrange(1, 12)
        kv_id = f"k{i}" if i % 10 == 0 else ""
        asked.append(
            lab.ask_later(prompt, ref=choose.choice(docs), name=f"a{i}", session=f"s{i % 7}", kv_id=kv_id, max_tokens=4)
        )
        if choose.random() < 0.3:
            lab.host.cancel(f"a{choose.randrange(max(0, i - 8), i + 1)}", choose.choice(list(Reason)))
        if i % 8 == 7:
            for _, future in asked[-8:]:
                future.result(30)
    for _, future in asked:
        future.result(30)
    assert all(isinstance(events[-1], AnswerDone | Failed) for events, _ in asked)
    assert {e[-1].code for e, _ in asked if isinstance(e[-1], Failed)} <= {"cancelled"}
    stats = lab.host.stats()
    assert (stats.running, stats.waiting, stats.document_references) == (0, 0, 0)
    assert stats.tail_slots_used <= 3
    assert lab.runner.n_tails == stats.tail_slots_used + 1
    assert lab.runner.n_documents == 3
    assert len(os.listdir("/proc/self/fd")) <= n_files
    for i in range(7):
        lab.host.release_session(f"s{i}")
    assert lab.host.stats().tail_slots_used == 0


def test_check_decodes_a_token_without_a_document(lab):
    lab.start()
    before = len(lab.runner.forwards)
    assert lab.host.check() > 0
    assert len(lab.runner.forwards) == before + 1


def test_info_tells_what_the_engine_is(lab):
    info = lab.start().info
    assert (info.engine, info.block_tokens, info.max_batch) == ("fake", 8, 3)
    assert info.fingerprint_digest == lab.runner.fingerprint.digest
    assert info.fingerprint["weights"] == "fake"
