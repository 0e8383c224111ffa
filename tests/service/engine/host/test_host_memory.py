"""Documents and tails in memory: shared, waited for, evicted, cancelled, freed."""

import os
import random
import threading
import time

from service.engine.messages import AnswerDone, DocumentRef, Failed
from service.engine.scheduler.cancel import Reason


def test_questions_at_once_cause_one_restore(lab):
    lab.start()
    lab.build()
    lab.host.close()
    lab.start(step_delay_s=0.005, n_slots=5)
    asked = [lab.ask_later(name=f"a{i}", session=f"s{i}", kv_id="") for i in range(4)]
    for _, future in asked:
        future.result(60)
    assert sorted(lab.started(e).restored_tokens for e, _ in asked) == [0, 0, 0, 100]
    assert len({tuple(lab.done(e).token_ids) for e, _ in asked}) == 1


def test_nan_is_a_failure_and_frees_everything(lab):
    lab.start()
    lab.build()
    lab.runner.poisoned.add(99)
    assert lab.failed(lab.ask([1, 99])).code == "internal"
    stats = lab.host.stats()
    assert (stats.tail_slots_used, stats.document_references, stats.running) == (0, 0, 0)


def test_cancel_while_answering_keeps_the_turn(lab):
    lab.start(step_delay_s=0.005)
    lab.build()
    events, future = lab.ask_later(max_tokens=400)
    while len(events) < 4:
        time.sleep(0.002)
    lab.host.cancel("a")
    future.result(60)
    assert lab.done(events).finish_reason == "cancelled"
    assert lab.done(events).kv_stored
    lab.runner.step_delay_s = 0
    assert lab.done(lab.follow(lab.done(events))).finish_reason == "length"


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
    second.result(60)
    assert lab.failed(waiting).code == "cancelled"
    lab.host.cancel("a")
    first.result(60)


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
        future.result(60)
    assert order == [f"a{i}" for i in range(8)]


def test_release_ends_answers_and_frees_the_document(lab):
    lab.start(step_delay_s=0.005)
    lab.build()
    events, future = lab.ask_later(max_tokens=400)
    while len(events) < 3:
        time.sleep(0.002)
    released = lab.host.release(lab.DOC)
    future.result(60)
    assert released.objects == 1
    assert released.nbytes > 0
    assert lab.failed(events).code == "cancelled"
    assert not lab.shards("turns")
    lab.host._context.scheduler.run(lambda: None)
    assert lab.runner.n_documents == 0
    assert lab.host.stats().tail_slots_used == 0
    assert lab.host.release(lab.DOC).objects == 0


def test_the_memory_budget_evicts_the_least_recently_used(lab):
    lab.start()
    token = lab.runner.document_nbytes(1)
    lab.host.close()
    lab.start(budget=token * 250)
    docs = [DocumentRef("own", f"d{i}") for i in range(3)]
    for ref in docs:
        lab.build(ref)
    assert lab.host.stats().resident_documents == 2
    assert lab.host.stats().resident_nbytes <= token * 250
    assert lab.started(lab.ask(ref=docs[1], session="s1", kv_id="")).source == "host"
    assert lab.started(lab.ask(ref=docs[0], session="s0", kv_id="")).source == "disk"
    assert lab.started(lab.ask(ref=docs[1], session="s1", kv_id="")).source == "host"
    assert lab.runner.n_documents == 2
    large = DocumentRef("own", "large")
    assert lab.failed(lab.build(large, [1] * 300)).code == "too_long"


def test_a_document_in_use_is_not_evicted_the_next_one_waits(lab):
    lab.start()
    token = lab.runner.document_nbytes(1)
    lab.host.close()
    lab.start(budget=token * 150, step_delay_s=0.005)
    other = DocumentRef("own", "other")
    lab.build()
    events, future = lab.ask_later(max_tokens=60)
    while not events:
        time.sleep(0.002)
    built = threading.Thread(target=lab.build, args=(other,))
    built.start()
    future.result(60)
    assert lab.done(events).finish_reason == "length"
    built.join(60)
    assert lab.host.stats().resident_documents == 1


def test_drain_ends_answers_with_what_they_have_and_refuses_new_ones(lab):
    lab.start(step_delay_s=0.005)
    lab.build()
    events, future = lab.ask_later(max_tokens=900)
    while len(events) < 3:
        time.sleep(0.002)
    lab.host.drain(0.4)
    future.result(60)
    assert (lab.done(events).finish_reason, lab.done(events).kv_stored) == ("cancelled", True)
    refusal = lab.failed(lab.ask())
    assert (refusal.code, refusal.retryable) == ("busy", True)


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
                future.result(60)
    for _, future in asked:
        future.result(60)
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
