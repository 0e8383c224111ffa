"""An engine whose host was lost: documents and turns come back from the tiers, and answers are the same."""

import shutil

import pytest

from cache_store.tiers.memory import MemoryTier
from service.engine.messages import BuildDone
from tests.service.engine.host.windowed import RETENTION, with_mark


@pytest.fixture
def tiers():
    return [MemoryTier("redis"), MemoryTier("object", durable=True)]


def lose_host(lab, tiers):
    """Another engine on an empty disk, after everything was sent."""
    lab.store.uploader.send_noted()
    lab.host.close()
    shutil.rmtree(lab.root)
    lab.start(tiers=tiers)


@pytest.mark.parametrize("source", ["redis", "object"])
def test_a_session_goes_on_after_the_loss_of_its_host(lab, tiers, source):
    lab.start(tiers=tiers)
    lab.build()
    first = lab.done(lab.ask(session="s1", kv_id="k1"))
    stayed = lab.done(lab.follow(first, "k1", session="s1", kv_id="k2"))
    lose_host(lab, tiers)
    if source == "object":
        tiers[0].copies.clear()
    events = lab.follow(first, "k1", session="s1", kv_id="k2")
    started = lab.started(events)
    assert (started.source, started.miss_reason, started.prefilled_tokens) == (source, None, 3)
    assert lab.done(events).token_ids == stayed.token_ids
    assert lab.host.stats().document_prefill_tokens_total == 0


def test_a_windowed_document_comes_back_with_its_rows_and_slots(lab, tiers):
    tokens = with_mark(530)
    lab.start(tiers=tiers)
    lab.build(tokens=tokens, retention=RETENTION)
    before = lab.ask((300, 1, 2), tokens=tokens, retention=RETENTION, kv_id="")
    lose_host(lab, tiers)
    after = lab.ask((300, 1, 2), tokens=tokens, retention=RETENTION, kv_id="")
    assert lab.started(after).source == "redis"
    assert lab.started(after).spans == lab.started(before).spans
    assert lab.done(after).token_ids == lab.done(before).token_ids


def test_a_build_elsewhere_finds_what_was_built(lab, tiers):
    lab.start(tiers=tiers)
    lab.build()
    lose_host(lab, tiers)
    (*_, done) = lab.build()
    assert isinstance(done, BuildDone)
    assert (done.already, done.prefilled_tokens) == (True, 0)


def test_damage_in_every_tier_is_a_miss_and_then_computed_again(lab, tiers):
    lab.start(tiers=tiers)
    lab.build()
    answer = lab.done(lab.ask(kv_id=""))
    lose_host(lab, tiers)
    for tier in tiers:
        for copy in tier.copies.values():
            copy.shards = [bytes(len(shard)) for shard in copy.shards]
    failed = lab.failed(lab.ask(kv_id=""))
    assert (failed.code, failed.miss_reason, failed.retryable) == ("snapshot_miss", "absent", True)
    assert all(not tier.copies for tier in tiers)
    lab.build()
    assert lab.done(lab.ask(kv_id="")).token_ids == answer.token_ids


def test_the_speed_of_prefill_is_measured(lab, tiers):
    lab.start(tiers=tiers)
    lab.build()
    assert lab.store.speeds.recompute_s(len(lab.TOKENS)) > 0
