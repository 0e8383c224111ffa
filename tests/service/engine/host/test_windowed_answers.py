"""Questions about windowed documents: what is fetched, and that restarts, batches and damage change nothing."""

import pytest

from cache_store.keys import SnapshotKey
from service.engine.messages import DocumentRef, SpanRef, TurnRef
from tests.service.engine.host.windowed import MARK, N_ROWS, N_TOKENS, RETENTION, TOKENS, built, with_mark

PLACES = [20, 300, 511, 530, 900]


def start(lab, tokens, **more):
    lab.start(**more)
    return built(lab.build(tokens=tokens, retention=RETENTION))


def ask(lab, tokens, prompt=(MARK, 1, 2), turns=(), **more):
    return lab.ask(prompt, turns, tokens=tokens, retention=RETENTION, **({"kv_id": ""} | more))


def holds(spans: list[SpanRef], token: int) -> bool:
    return any(span.first <= token < span.first + span.n_tokens for span in spans)


@pytest.mark.parametrize("place", PLACES)
def test_a_question_fetches_the_span_it_names(lab, place):
    tokens = with_mark(place)
    start(lab, tokens)
    started = lab.started(ask(lab, tokens))
    assert holds(started.spans, place)
    assert sum(span.n_tokens for span in started.spans) <= RETENTION.fetch_tokens
    assert all(span.first >= 8 and span.first + span.n_tokens <= N_TOKENS - 40 for span in started.spans)
    assert (started.first_pass_tokens, started.prefilled_tokens) == (3, 3)
    assert (started.reused_tokens, started.restored_tokens, started.source) == (N_TOKENS, 0, "host")
    assert started.fetch_ms > 0


def test_fetched_rows_are_those_of_the_cold_snapshot_and_leave_the_tail(lab):
    tokens = with_mark(530)
    start(lab, tokens)
    taken, honest = [], lab.runner.import_tail

    def import_tail(slot, blocks, n_tokens, **more):
        taken.append((blocks, n_tokens, more))
        honest(slot, blocks, n_tokens, **more)

    lab.runner.import_tail = import_tail
    events = ask(lab, tokens)
    (blocks, n_tokens, more), spans = taken[0], lab.started(events).spans
    assert (n_tokens, more) == (sum(span.n_tokens for span in spans), {"fetched": True})
    subject_key = SnapshotKey("own", "document", "doc")
    with lab.store.open(subject_key, lab.runner.fingerprint, lab.runner.layout) as reader:
        for layer in range(2):
            whole = b"".join(bytes(records) for _, _, records, _ in reader.read_layer(layer))
            cold = lab.runner._rows.decode(memoryview(whole), N_TOKENS)
            got = lab.runner._rows.decode(memoryview(b"".join(bytes(block[layer]) for block in blocks)), n_tokens)
            at = 0
            for span in spans:
                expected = cold[:, span.first : span.first + span.n_tokens]
                assert (got[:, at : at + span.n_tokens] == expected).all()
                at += span.n_tokens
    tail = lab.host._context.tails._idle["s"]
    assert lab.host._context.scheduler.run(lab.runner.tail_length, tail.slot) == tail.n_tokens
    assert tail.n_tokens == len(lab.done(events).token_ids)


def test_answers_and_follow_ups_are_the_same_after_a_restart(lab):
    tokens = with_mark(530)
    start(lab, tokens)
    first = ask(lab, tokens, kv_id="k1")
    turns = [TurnRef("k1", lab.done(first).token_ids, lab.started(first).spans)]
    pending = lab.done(first).pending_ids
    second = ask(lab, tokens, [*pending, 9], turns, kv_id="k2")
    turns.append(TurnRef("k2", lab.done(second).token_ids, lab.started(second).spans))
    third = ask(lab, tokens, [*lab.done(second).pending_ids, 7], turns, kv_id="k3")
    for session, later in (("again", "elsewhere"), ("s", "t")):
        lab.host.close()
        lab.start()
        events = ask(lab, tokens, session=session)
        assert lab.started(events).source == "disk"
        assert lab.started(events).restored_tokens == N_ROWS
        assert lab.started(events).reused_tokens == N_TOKENS
        assert lab.started(events).spans == lab.started(first).spans
        assert lab.done(events).token_ids == lab.done(first).token_ids
        assert lab.host.stats().document_prefill_tokens_total == 0
        events = ask(lab, tokens, [*pending, 9], turns[:1], session=later)
        n_turn = len(turns[0].token_ids)
        assert (lab.started(events).miss_reason, lab.started(events).restored_tokens) == (None, n_turn)
        assert lab.started(events).reused_tokens == N_TOKENS + n_turn
        assert lab.done(events).token_ids == lab.done(second).token_ids
        events = ask(lab, tokens, [*lab.done(second).pending_ids, 7], turns, session="third")
        assert lab.started(events).spans == lab.started(third).spans
        assert lab.done(events).token_ids == lab.done(third).token_ids


@pytest.mark.parametrize("is_first", [True, False])
def test_a_lost_turn_is_computed_again_seeing_what_it_saw(lab, is_first):
    tokens = with_mark(530)
    start(lab, tokens)
    first = ask(lab, tokens, kv_id="k1")
    turns = [TurnRef("k1", lab.done(first).token_ids, lab.started(first).spans)]
    second = ask(lab, tokens, [*lab.done(first).pending_ids, 9], turns, kv_id="k2")
    turns.append(TurnRef("k2", lab.done(second).token_ids, lab.started(second).spans))
    third = ask(lab, tokens, [7], turns)
    lab.host.close()
    for shard in lab.shards("turns"):
        if ("k1" if is_first else "k2") in str(shard):
            shard.unlink()
    lab.start()
    events = ask(lab, tokens, [7], turns)
    n_lost = sum(len(turn.token_ids) for turn in turns[not is_first :])
    assert lab.started(events).miss_reason == "truncated"
    assert lab.started(events).prefilled_tokens == lab.done(events).engine_prefilled_tokens == n_lost + 1
    assert lab.done(events).token_ids == lab.done(third).token_ids


def test_a_turn_that_saw_other_spans_is_another_turn(lab):
    tokens = with_mark(530)
    start(lab, tokens)
    first = ask(lab, tokens, kv_id="k1")
    other = TurnRef("k1", lab.done(first).token_ids, [SpanRef(64, 32)])
    started = lab.started(ask(lab, tokens, [9], [other]))
    assert (started.miss_reason, started.prefilled_tokens) == ("checksum", len(other.token_ids) + 1)


def test_a_follow_up_looks_for_what_the_turn_before_named(lab):
    tokens = with_mark(530)
    tokens[700] = MARK + 1
    start(lab, tokens)
    first = ask(lab, tokens, [MARK], kv_id="k1", max_tokens=1)
    before = TurnRef("k1", lab.done(first).token_ids, lab.started(first).spans)
    started = lab.started(ask(lab, tokens, [9, 4], [before]))
    assert holds(started.spans, 530)
    assert (started.first_pass_tokens, started.prefilled_tokens) == (len(before.token_ids) + 2, 2)
    other = lab.started(ask(lab, tokens, [MARK + 1], [before])).spans
    assert holds(other, 700)


def test_what_is_looked_for_again_stays_within_the_context(lab):
    start(lab, TOKENS, max_context=520 + 20, tail_tokens=200)
    before = TurnRef("", list(range(2, 12)), [])
    started = lab.started(ask(lab, TOKENS, [9, 4], [before], max_tokens=3))
    assert started.first_pass_tokens == 2 + 8


def test_room_for_what_an_earlier_turn_saw(lab):
    start(lab, TOKENS, tail_tokens=200)
    lost = TurnRef("", [4, 5], [SpanRef(96, 150)])
    events = ask(lab, TOKENS, [7], [lost], max_tokens=500)
    assert lab.done(events).completion_tokens == 200 - 150 - 2 - 1


def test_two_sessions_at_once_are_answered_as_each_alone(lab):
    tokens = [*with_mark(530)]
    tokens[700] = MARK + 1
    start(lab, tokens, n_slots=5)
    prompts = {"a": (MARK, 1), "b": (MARK + 1, 2), "c": (5, MARK)}
    alone = {}
    for session, prompt in prompts.items():
        events = ask(lab, tokens, prompt, session=session, max_tokens=40)
        alone[session] = lab.done(events).token_ids, lab.started(events).spans
    lab.host.close()
    lab.start(n_slots=5, step_delay_s=0.002)
    open_ones = {
        session: lab.ask_later(
            prompt, tokens=tokens, retention=RETENTION, session=session, name=session, kv_id="", max_tokens=40
        )
        for session, prompt in prompts.items()
    }
    for session, (events, future) in open_ones.items():
        future.result(60)
        assert (lab.done(events).token_ids, lab.started(events).spans) == alone[session]
    assert max(map(len, lab.runner.forwards)) > 1
    assert lab.host.stats().resident_documents == 1


@pytest.mark.parametrize("layer", [0, 1])
def test_a_damaged_cold_block_is_a_miss_and_a_rebuild_heals_it(lab, layer):
    """Layer 1 has the index head: the damage shows when the index is made, in layer 0 when rows are fetched."""
    tokens = with_mark(530)
    start(lab, tokens)
    expected = ask(lab, tokens)
    resident = [shard.read_bytes() for shard in lab.shards("residents")]
    lab.host.close()
    lab.start()
    flip(lab, block=530 // 8, layer=layer)
    refusal = lab.failed(ask(lab, tokens))
    assert (refusal.code, refusal.miss_reason) == ("snapshot_miss", "checksum")
    assert not lab.shards()
    assert lab.failed(ask(lab, tokens)).code == "snapshot_miss"
    done = built(lab.build(tokens=tokens, retention=RETENTION))
    assert done.prefilled_tokens == N_TOKENS
    assert [shard.read_bytes() for shard in lab.shards("residents")] == resident
    again = ask(lab, tokens)
    assert lab.started(again).spans == lab.started(expected).spans
    assert lab.done(again).token_ids == lab.done(expected).token_ids
    assert lab.host.stats().tail_slots_used == 1


def flip(lab, block: int, layer: int) -> None:
    """Change a byte of one record of the cold snapshot."""
    key = SnapshotKey("own", "document", "doc")
    with lab.store.open(key, lab.runner.fingerprint, lab.runner.layout) as reader:
        record = bytes(reader.read_blocks([block])[0][layer])
    (shard,) = lab.shards()
    data = bytearray(shard.read_bytes())
    assert data.count(record) == 1
    data[data.index(record) + 5] ^= 1
    shard.write_bytes(data)


def test_damage_that_comes_while_the_document_is_in_use(lab):
    tokens = with_mark(530)
    start(lab, tokens)
    ask(lab, tokens)
    flip(lab, block=530 // 8, layer=0)
    refusal = lab.failed(ask(lab, tokens, session="other"))
    assert (refusal.code, refusal.miss_reason) == ("snapshot_miss", "checksum")
    assert lab.host.stats().index_documents == 0
    built(lab.build(tokens=tokens, retention=RETENTION))
    lab.done(ask(lab, tokens, session="other"))


def test_a_resident_canary_that_disagrees_is_a_miss_of_the_rows_alone(lab):
    tokens = with_mark(530)
    start(lab, tokens)
    lab.host.close()
    lab.start()
    honest = lab.runner._logits
    lab.runner._logits = lambda *a: honest(*a) + 1
    refusal = lab.failed(ask(lab, tokens))
    assert (refusal.code, refusal.miss_reason) == ("snapshot_miss", "canary")
    assert lab.shards()
    assert not lab.shards("residents")


def test_room_counts_positions_and_what_may_be_fetched(lab):
    start(lab, TOKENS, tail_tokens=120, max_context=656)
    assert lab.done(ask(lab, TOKENS, range(1, 11), max_tokens=500)).completion_tokens == 120 - 96 - 10
    refusal = lab.failed(ask(lab, TOKENS, range(1, 30)))
    assert refusal.code == "too_long"
    assert "behind a document of 520" in refusal.detail


def test_without_index_heads_nothing_is_fetched(lab):
    tokens = with_mark(530)
    assert start(lab, tokens, heads=[]).index_nbytes == 0
    assert lab.host.info.n_index_heads == 0
    started = lab.started(ask(lab, tokens))
    assert (started.spans, started.first_pass_tokens, started.fetch_ms) == ([], 0, 0.0)


def test_indexes_are_shared_and_give_way_within_their_budget(lab):
    tokens, other = with_mark(530), DocumentRef("own", "other")
    first = start(lab, tokens, index=1)
    built(lab.build(other, tokens=TOKENS, retention=RETENTION))
    assert lab.host.stats().index_documents == 1
    events = ask(lab, tokens)
    assert holds(lab.started(events).spans, 530)
    stats = lab.host.stats()
    assert (stats.index_documents, stats.index_nbytes, stats.resident_documents) == (1, first.index_nbytes, 2)


def test_a_released_document_is_nowhere_in_memory(lab):
    tokens = with_mark(530)
    done = start(lab, tokens)
    ask(lab, tokens)
    released = lab.host.release(lab.DOC)
    assert (released.objects, released.nbytes) == (2, lab.runner.document_nbytes(N_ROWS) + done.index_nbytes)
    stats = lab.host.stats()
    assert (stats.resident_nbytes, stats.index_documents, stats.tail_slots_used) == (0, 0, 0)
    assert lab.host.release(lab.DOC).objects == 0
