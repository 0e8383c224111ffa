"""Builds: found, resumed, cancelled, refused."""

import time

import pytest

from cache_store.keys import SnapshotKey
from service.engine.messages import BuildDone, BuildRequest, DocumentRef


def test_a_second_build_finds_the_snapshot(lab):
    lab.start()
    lab.build()
    again = lab.build()
    assert isinstance(again[-1], BuildDone)
    assert (again[-1].already, again[-1].prefilled_tokens) == (True, 0)


def test_a_build_killed_by_close_goes_on_from_its_journal_with_equal_bytes(lab):
    lab.start()
    lab.build()
    whole = [s.read_bytes() for s in lab.shards()]
    lab.store.delete(SnapshotKey("own", "document", "doc"))
    lab.host.close()
    lab.start(layer_delay_s=0.1)
    events: list = []
    future = lab.host.build(BuildRequest("b", lab.DOC, lab.TOKENS), events.append)
    while len(events) < 5:
        time.sleep(0.002)
    lab.host.close()
    future.result(60)
    assert lab.failed(events).retryable
    lab.start()
    again = lab.build()
    assert isinstance(again[-1], BuildDone)
    assert again[-1].resumed_tokens >= 32
    assert again[-1].resumed_tokens + again[-1].prefilled_tokens == 100
    assert [s.read_bytes() for s in lab.shards()] == whole


@pytest.mark.parametrize(("drain", "kept"), [(False, False), (True, True)])
def test_a_cancelled_build_is_given_up_but_a_drained_one_is_kept(lab, drain, kept):
    lab.start(layer_delay_s=0.1)
    events: list = []
    future = lab.host.build(BuildRequest("b", lab.DOC, lab.TOKENS), events.append)
    while len(events) < 5:
        time.sleep(0.002)
    if drain:
        lab.host.drain(5)
    else:
        lab.host.cancel("b")
    future.result(60)
    assert lab.failed(events).code == "cancelled"
    assert bool(list((lab.root / "building").rglob("*"))) == kept
    lab.host._context.scheduler.run(lambda: None)
    assert lab.runner.n_documents == 0


def test_a_full_disk_fails_the_build_but_not_an_answer(lab):
    lab.start()
    lab.build()
    used = lab.store.usage()
    lab.host.close()
    lab.start(disk=used + 10)
    assert lab.failed(lab.build(DocumentRef("own", "more"))).code == "storage"
    events = lab.ask()
    assert lab.done(events).finish_reason == "length"
    assert not lab.done(events).kv_stored
    assert lab.done(lab.follow(lab.done(events))).finish_reason == "length"


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
