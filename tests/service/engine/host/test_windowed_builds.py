"""Windowed documents: computed in segments, kept cold, and what of them is resident."""

import numpy as np
import pytest
from msgspec.structs import replace

from cache_store.errors import MissReason
from cache_store.keys import SnapshotKey
from service.engine.host.kept import QUESTION_GAP
from service.engine.messages import BuildProgress, DocumentRef
from tests.service.engine.host.test_windowed_slots import slots_of
from tests.service.engine.host.windowed import (
    COLD,
    N_ROWS,
    N_TOKENS,
    RESIDENT,
    RETENTION,
    TOKENS,
    build_until,
    built,
    damage,
    files,
    opened,
    rows_of,
)


def test_a_build_says_what_it_computed_and_what_stays_in_memory(lab):
    lab.start()
    events = lab.build(tokens=TOKENS, retention=RETENTION)
    done, stages = built(events), [e for e in events if isinstance(e, BuildProgress)]
    assert (done.n_tokens, done.prefilled_tokens, done.resumed_tokens, done.already) == (N_TOKENS, N_TOKENS, 0, False)
    assert done.resident_tokens == N_ROWS
    assert done.index_nbytes == lab.host.stats().index_nbytes > 0
    assert done.resident_nbytes < done.nbytes / 8
    assert lab.host.stats().resident_nbytes == lab.runner.document_nbytes(N_ROWS)
    assert list(dict.fromkeys(e.stage for e in stages)) == ["prefilling", "compacting", "persisting"]
    compacting = [(e.done, e.total) for e in stages if e.stage == "compacting"]
    assert compacting[-1] == (N_TOKENS - 48, N_TOKENS - 48)
    assert lab.host.stats().document_prefill_tokens_total == N_TOKENS
    lab.host._context.scheduler.run(lambda: None)
    assert lab.runner.n_documents == 1


def test_a_segment_is_what_would_be_computed_behind_the_sinks_alone(lab):
    lab.start()
    built(lab.build(tokens=TOKENS, retention=RETENTION))
    for k in (1, 2, 3):
        alone = DocumentRef("own", f"alone{k}")
        part = TOKENS[256 * k : 256 * (k + 1)]
        built(lab.build(alone, [*TOKENS[:8], *part]))
        key = SnapshotKey("own", "document", alone.document_id)
        for layer in range(2):
            cold = rows_of(lab, COLD, layer)[:, 256 * k : 256 * (k + 1)]
            assert np.array_equal(cold, rows_of(lab, key, layer)[:, 8:])
    with opened(lab, COLD) as reader:
        assert (reader.next_position, reader.last_position) == (264, 8 + N_TOKENS - 768 - 1)


def test_the_resident_rows_are_bytes_of_the_cold_ones(lab):
    lab.start(n_kv_heads=2)
    built(lab.build(tokens=TOKENS, retention=RETENTION))
    with opened(lab, RESIDENT) as reader:
        assert reader.token_ids.tolist() == [*TOKENS[:8], *TOKENS[-40:]]
        assert (reader.next_position, reader.last_position) == (264 + QUESTION_GAP, 8 + N_TOKENS - 768 - 1)
    for layer in range(2):
        cold, rows = rows_of(lab, COLD, layer), rows_of(lab, RESIDENT, layer)
        assert np.array_equal(rows, np.concatenate((cold[:, :8], cold[:, -40:]), 1))


@pytest.mark.parametrize("stopped_at", [48, 256, 264, 384, 600, 760, 960, 1000])
def test_a_build_killed_in_any_segment_goes_on_with_equal_bytes(lab, stopped_at):
    lab.start()
    built(lab.build(tokens=TOKENS, retention=RETENTION))
    whole = files(lab), files(lab, "resident", "slots")
    lab.store.delete(COLD)
    lab.host.close()
    lab.start(layer_delay_s=0.002)
    events = build_until(lab, lambda e: e.done >= stopped_at, lab.host.close)
    assert lab.failed(events).retryable
    durable = max(e.done for e in events if isinstance(e, BuildProgress) and e.stage == "prefilling")
    lab.start()
    done = built(lab.build(tokens=TOKENS, retention=RETENTION))
    assert done.prefilled_tokens < N_TOKENS - durable + 16
    # The last block may have been the one before the snapshot was published; then nothing is computed or resumed.
    assert done.prefilled_tokens + done.resumed_tokens == (N_TOKENS if done.resumed_tokens else 0)
    assert (files(lab), files(lab, "resident", "slots")) == whole


@pytest.mark.parametrize(("drain", "kept"), [(False, False), (True, True)])
def test_a_cancelled_build_is_given_up_but_a_drained_one_is_kept(lab, drain, kept):
    lab.start(layer_delay_s=0.005)
    end = (lambda: lab.host.drain(5)) if drain else (lambda: lab.host.cancel("b"))
    events = build_until(lab, lambda e: e.done >= 300, end)
    assert lab.failed(events).code == "cancelled"
    assert bool(list((lab.root / "building").rglob("*"))) == kept
    lab.host._context.scheduler.run(lambda: None)
    assert lab.runner.n_documents == 0


@pytest.mark.parametrize("stage", ["prefilling", "compacting"])
def test_a_document_deleted_while_it_is_built_leaves_nothing_in_memory(lab, stage):
    lab.start(layer_delay_s=0.002, prepare=slow_replay)
    events = build_until(lab, lambda e: e.stage == stage and e.done >= 100, lambda: lab.host.release(lab.DOC))
    assert lab.failed(events).code == "cancelled"
    assert not list((lab.root / "building").rglob("shard-*"))
    lab.host._context.scheduler.run(lambda: None)
    assert lab.runner.n_documents == lab.host.stats().resident_nbytes == 0


@pytest.mark.parametrize("end", ["cancel", "drain", "close"])
def test_ended_while_compacting_only_that_is_done_again(lab, end):
    lab.start(layer_delay_s=0.002, prepare=slow_replay)
    ends = {"cancel": lambda: lab.host.cancel("b"), "drain": lambda: lab.host.drain(5), "close": lab.host.close}
    events = build_until(lab, lambda e: e.stage == "compacting", ends[end])
    assert lab.failed(events).code == ("engine_lost" if end == "close" else "cancelled")
    assert not lab.shards("residents")
    assert not list((lab.root / "building").rglob("shard-*"))
    lab.host.close()
    lab.start()
    done = built(lab.build(tokens=TOKENS, retention=RETENTION))
    assert (done.prefilled_tokens, done.resumed_tokens, done.already) == (0, 0, False)
    assert lab.host.stats().document_prefill_tokens_total == 0
    lab.done(lab.ask(tokens=TOKENS, retention=RETENTION))


def slow_replay(runner) -> None:
    import time

    replay = runner.replay

    def slowly(*arguments):
        time.sleep(0.6)
        return replay(*arguments)

    runner.replay = slowly


def test_a_second_build_finds_both_snapshots(lab):
    lab.start()
    first = built(lab.build(tokens=TOKENS, retention=RETENTION))
    again = built(lab.build(tokens=TOKENS, retention=RETENTION))
    assert (again.already, again.prefilled_tokens) == (True, 0)
    for name in ("nbytes", "resident_tokens", "resident_nbytes", "index_nbytes"):
        assert getattr(again, name) == getattr(first, name)


def test_of_a_damaged_resident_snapshot_only_it_is_made_again(lab):
    lab.start()
    lab.build(tokens=TOKENS, retention=RETENTION)
    before = files(lab), files(lab, "resident", "slots")
    lab.host.close()
    damage(lab.shards("residents")[0])
    lab.start()
    refusal = lab.failed(lab.ask(tokens=TOKENS, retention=RETENTION))
    assert (refusal.code, refusal.miss_reason) == ("snapshot_miss", "checksum")
    done = built(lab.build(tokens=TOKENS, retention=RETENTION))
    assert (done.prefilled_tokens, done.already) == (0, False)
    assert (files(lab), files(lab, "resident", "slots")) == before
    lab.done(lab.ask(tokens=TOKENS, retention=RETENTION))


def test_a_cold_snapshot_that_turns_out_damaged_is_computed_again(lab):
    lab.start()
    lab.build(tokens=TOKENS, retention=RETENTION)
    before = files(lab), files(lab, "resident", "slots")
    lab.store.delete(RESIDENT)
    damage(lab.shards()[0])
    done = built(lab.build(tokens=TOKENS, retention=RETENTION))
    assert done.prefilled_tokens == N_TOKENS
    assert (files(lab), files(lab, "resident", "slots")) == before
    assert [p.name for p in (lab.root / "quarantine").glob("*.json")]


def test_a_cold_snapshot_that_means_something_else_now_is_computed_again(lab):
    lab.start()
    lab.build(tokens=TOKENS, retention=RETENTION)
    lab.store.quarantine(RESIDENT, lab.runner.fingerprint.digest, MissReason.CANARY, "on purpose")
    lab.host.close()
    lab.start()
    honest = lab.runner._logits
    lab.runner._logits = lambda *a: honest(*a) + 1  # the same bytes, other numerics
    assert built(lab.build(tokens=TOKENS, retention=RETENTION)).prefilled_tokens == N_TOKENS


def test_slots_are_what_the_replay_looks_at_most(lab):
    lab.start(n_kv_heads=2)
    seen: list[tuple] = []
    honest = lab.runner.replay

    def replay(document, tokens, sinks, first, last, *more):
        seen.append((tokens, sinks, first, last))
        return honest(document, tokens, sinks, first, last, *more)

    lab.runner.replay = replay
    built(lab.build(tokens=TOKENS, retention=RETENTION))
    assert [(sinks, first, last) for _, sinks, first, last in seen] == [
        (8, 8, 256),
        (8, 8, 264),
        (8, 8, 264),
        (8, 8, 200),
    ]
    assert [tokens[:2] for tokens, *_ in seen] == [[3, 1]] * 4
    assert [token for tokens, *_ in seen for token in tokens[2:]] == TOKENS[8:-40]
    many = slots_of(lab)
    built(lab.build(tokens=TOKENS, retention=replace(RETENTION, summary_tokens=8)))
    few = slots_of(lab)
    assert all(set(few[i][j]) <= set(many[i][j]) for i in range(2) for j in range(2))
    assert [sum(len(own) for of_layer in slots for own in of_layer) for slots in (many, few)] == [24 * 4, 8 * 4]
    assert lab.host.stats().resident_documents == 1


@pytest.mark.parametrize(
    ("retention", "n_rows"),
    [
        (replace(RETENTION, summary_tokens=0), 48),
        (replace(RETENTION, segment_tokens=0), N_ROWS),
        (replace(RETENTION, summary_tokens=5000), N_TOKENS),
        (replace(RETENTION, window_tokens=0, summary_tokens=0), 9),
        (replace(RETENTION, sink_tokens=0), N_ROWS - 8),
    ],
)
def test_other_retentions(lab, retention, n_rows):
    lab.start()
    assert built(lab.build(tokens=TOKENS, retention=retention)).resident_tokens == n_rows
    first = lab.done(lab.ask(tokens=TOKENS, retention=retention, kv_id=""))
    lab.host.close()
    lab.start()
    assert built(lab.build(tokens=TOKENS, retention=retention)).already
    assert lab.done(lab.ask(tokens=TOKENS, retention=retention, kv_id="")).token_ids == first.token_ids


def test_all_of_a_document_as_rows_answers_like_the_whole_document(lab):
    lab.start()
    lab.build(tokens=TOKENS)
    whole = lab.done(lab.ask(tokens=TOKENS, kv_id=""))
    everything = replace(RETENTION, summary_tokens=5000, segment_tokens=0)
    done = built(lab.build(tokens=TOKENS, retention=everything))
    assert (done.prefilled_tokens, done.index_nbytes) == (0, 0)
    events = lab.ask(tokens=TOKENS, retention=everything, kv_id="", session="other")
    assert lab.done(events).token_ids == whole.token_ids
    assert lab.started(events).spans == []


def test_a_document_beyond_the_budget_and_the_context_is_built(lab):
    lab.start(max_context=656, tail_tokens=128)
    budget = lab.runner.document_nbytes(264)
    lab.host.close()
    lab.start(max_context=656, tail_tokens=128, budget=budget)
    assert lab.host.info.resident_tokens == 264
    assert lab.failed(lab.build(tokens=TOKENS)).code == "too_long"
    done = built(lab.build(tokens=TOKENS, retention=RETENTION))
    assert done.resident_tokens == N_ROWS
    assert lab.done(lab.ask(tokens=TOKENS, retention=RETENTION)).finish_reason == "length"


def test_a_full_disk_fails_the_build_and_leaves_the_cold_snapshot(lab):
    lab.start()
    lab.build(tokens=TOKENS, retention=RETENTION)
    used = lab.store.usage()
    lab.store.delete(RESIDENT)
    lab.host.close()
    lab.start(disk=used - 100)
    assert lab.failed(lab.build(tokens=TOKENS, retention=RETENTION)).code == "storage"
    assert files(lab)
    lab.host.close()
    lab.start()
    assert built(lab.build(tokens=TOKENS, retention=RETENTION)).prefilled_tokens == 0


def test_what_a_runner_cannot_do_is_refused(lab):
    lab.start(sink_multiple=16)
    assert lab.host.info.sink_multiple == 16
    assert "multiple of 16" in lab.failed(lab.build(tokens=TOKENS, retention=RETENTION)).detail
    assert lab.failed(lab.build(tokens=TOKENS, retention=replace(RETENTION, summary_tokens=-1))).code == "internal"
    assert lab.failed(lab.build(tokens=TOKENS, retention=replace(RETENTION, segment_tokens=100))).code == "internal"


def test_a_whole_document_and_a_windowed_one_are_not_taken_for_each_other(lab):
    lab.start()
    lab.build(tokens=TOKENS, retention=RETENTION)
    assert lab.failed(lab.ask(tokens=TOKENS)).code == "snapshot_miss"
    assert built(lab.build(tokens=TOKENS)).prefilled_tokens == N_TOKENS
    lab.done(lab.ask(tokens=TOKENS))
    assert lab.failed(lab.ask(tokens=TOKENS, retention=replace(RETENTION, window_tokens=48))).code == "snapshot_miss"


@pytest.mark.parametrize(
    ("changes", "position"),
    [({}, 264 + QUESTION_GAP), ({"summary_tokens": 0}, 264), ({"segment_tokens": 0}, N_TOKENS)],
)
def test_a_question_begins_behind_a_gap_where_slots_of_several_segments_share_places(lab, changes, position):
    lab.start()
    built(lab.build(tokens=TOKENS, retention=replace(RETENTION, **changes)))
    with opened(lab, RESIDENT) as reader:
        assert reader.next_position == position
