"""Questions, follow-ups and their accounting, over restarts and damage."""

import pytest

from service.engine.messages import AnswerText, BuildDone, BuildProgress, TurnRef


def test_build_then_answer_then_answer_after_a_restart(lab):
    lab.start()
    events = lab.build()
    assert isinstance(events[-1], BuildDone)
    assert (events[-1].prefilled_tokens, events[-1].resumed_tokens, events[-1].n_blocks) == (100, 0, 13)
    progress = [e.done for e in events if isinstance(e, BuildProgress) and e.stage == "prefilling"]
    assert progress == [*range(8, 100, 8), 100]
    first = lab.ask(kv_id="")
    assert (lab.started(first).source, lab.started(first).restored_tokens) == ("host", 0)
    lab.host.close()
    lab.start()
    second = lab.ask(kv_id="")
    assert (lab.started(second).source, lab.started(second).restored_tokens) == ("disk", 100)
    assert (lab.started(second).reused_tokens, lab.started(second).prefilled_tokens) == (100, 3)
    assert lab.done(second).token_ids == lab.done(first).token_ids
    assert lab.done(second).engine_prefilled_tokens == 3
    assert lab.host.stats().prefilled_tokens_total == 3
    assert lab.host.stats().document_prefill_tokens_total == 0


def test_answers_stream_text_and_account_for_every_token(lab):
    lab.start(script=[10, 11, 12, 13], end_ids=[13])
    lab.build()
    events = lab.ask(max_tokens=50)
    assert "".join(e.text for e in events if isinstance(e, AnswerText)) == "<10><11><12>"
    assert lab.done(events).finish_reason == "stop"
    assert lab.done(events).token_ids == [1, 2, 3, 10, 11, 12]
    assert lab.done(events).pending_ids == [13]
    assert lab.done(events).completion_tokens == 4
    assert lab.done(events).kv_stored
    assert lab.done(lab.ask(stop=("<12>",), session="s2")).finish_reason == "stop"


def test_follow_ups_equal_before_and_after_a_restart(lab):
    answers = []
    for restart, session in ((False, "stayed"), (True, "restarted")):
        lab.start()
        lab.build()
        first = lab.done(lab.ask(session=session, kv_id=f"{session}1"))
        if restart:
            lab.host.close()
            lab.start()
        events = lab.follow(first, f"{session}1", session=session, kv_id=f"{session}2")
        assert lab.started(events).reused_tokens == 100 + len(first.token_ids)
        assert (lab.started(events).prefilled_tokens, lab.started(events).miss_reason) == (3, None)
        before = [TurnRef(f"{session}1", first.token_ids)]
        third = lab.follow(lab.done(events), f"{session}2", before, session=session, kv_id=f"{session}3")
        answers.append((lab.done(events).token_ids, lab.done(third).token_ids))
        lab.host.close()
    assert answers[0] == answers[1]


def test_an_idle_tail_gives_way_and_comes_back_from_disk(lab):
    lab.start(n_slots=2)
    lab.build()
    first = lab.done(lab.ask(session="s1", kv_id="k1"))
    stayed = lab.done(lab.follow(first, "k1", session="s1", kv_id="k2"))
    lab.ask(session="other", kv_id="")
    assert lab.host.stats().tail_slots_used == 1
    events = lab.follow(first, "k1", session="s1", kv_id="k2")
    assert lab.started(events).restored_tokens == len(first.token_ids)
    assert lab.done(events).token_ids == stayed.token_ids


def test_forked_sessions_share_their_turns_and_go_on_alike(lab):
    lab.start()
    lab.build()
    first = lab.done(lab.ask(session="s1"))
    a = lab.follow(first, session="s1", kv_id="ka")
    b = lab.follow(first, session="fork", kv_id="kb")
    assert lab.done(a).token_ids == lab.done(b).token_ids
    assert lab.started(b).reused_tokens == lab.started(a).reused_tokens


def test_a_retried_turn_cuts_the_tail_back(lab):
    lab.start()
    lab.build()
    first = lab.done(lab.ask())
    once = lab.follow(first)
    twice = lab.follow(first)
    assert lab.done(once).token_ids == lab.done(twice).token_ids
    assert lab.started(twice).restored_tokens == 0


@pytest.mark.parametrize("damage", ["flip", "remove", "unsaved"])
def test_a_lost_turn_is_computed_again(lab, damage):
    lab.start()
    lab.build()
    first = lab.done(lab.ask())
    second = lab.done(lab.follow(first))
    turns = [TurnRef("kv1", first.token_ids), TurnRef("kv2", second.token_ids)]
    expected = lab.done(lab.ask([*second.pending_ids, 5], turns, kv_id="kv3"))
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
    assert lab.started(events).miss_reason == reason
    assert (lab.started(events).reused_tokens, lab.started(events).prefilled_tokens) == (100, n_lost + 2)
    assert lab.done(events).engine_prefilled_tokens == n_lost + 2
    assert lab.done(events).token_ids == expected.token_ids
    assert lab.started(lab.ask([1], turns[:1], session="x", kv_id="")).miss_reason in (None, "absent")


@pytest.mark.parametrize("where", [0, 40, -1])
def test_a_damaged_snapshot_is_a_miss_and_a_rebuild_heals_it(lab, where):
    lab.start()
    lab.build()
    expected = lab.done(lab.ask(kv_id=""))
    lab.host.close()
    shard = lab.shards()[0]
    data = bytearray(shard.read_bytes())
    data[where] ^= 1
    shard.write_bytes(data)
    lab.start()
    events = lab.ask(kv_id="")
    assert (lab.failed(events).code, lab.failed(events).miss_reason) == ("snapshot_miss", "checksum")
    assert len(events) == 1
    assert lab.failed(lab.ask(kv_id="")).miss_reason in ("checksum", "absent")
    lab.build()
    assert lab.done(lab.ask(kv_id="")).token_ids == expected.token_ids
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
        assert lab.failed(events).code == "snapshot_miss"
        assert not [e for e in events if isinstance(e, AnswerText)]
        if lab.failed(events).miss_reason == "canary":
            break
    assert lab.failed(events).miss_reason == "canary"
    assert lab.failed(lab.ask()).miss_reason != "canary"
    assert lab.host.stats().resident_documents == 0


def test_the_canary_is_checked_before_a_session_that_goes_on_after_a_restart(lab):
    lab.start()
    lab.build()
    first = lab.done(lab.ask())
    lab.host.close()
    lab.start()
    honest = lab.runner._logits
    lab.runner._logits = lambda *a: honest(*a) + 1
    events = lab.follow(first)
    assert lab.failed(events).miss_reason == "canary"


def test_an_absent_snapshot_and_other_tokens_are_misses(lab):
    lab.start()
    assert lab.failed(lab.ask()).miss_reason == "absent"
    lab.build()
    assert lab.failed(lab.ask(tokens=[*lab.TOKENS, 1])).code == "snapshot_miss"
    lab.build()
    assert lab.done(lab.ask(session="s2")).finish_reason == "length"


def test_too_long_a_question_is_refused_with_the_numbers(lab):
    lab.start(tail_tokens=20, max_context=110)
    lab.build()
    refusal = lab.failed(lab.ask(range(1, 12)))
    assert refusal.code == "too_long"
    assert "11 tokens" in refusal.detail
    assert "room for 9" in refusal.detail
    events = lab.ask([1] * 7, max_tokens=500)
    assert (lab.done(events).finish_reason, lab.done(events).completion_tokens) == ("length", 3)
    assert lab.failed(lab.ask(max_tokens=0)).code == "internal"
