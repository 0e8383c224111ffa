"""Summary slots of windowed documents: each head's own, stored, restored, damaged, counted."""

import numpy as np
import pytest
from msgspec.structs import replace

from service.engine.messages import TurnRef
from tests.service.engine.host.host_copies import FakeCopies
from tests.service.engine.host.windowed import (
    COLD,
    N_ROWS,
    N_TOKENS,
    RESIDENT,
    RETENTION,
    SLOTS,
    TOKENS,
    built,
    damage,
    files,
    opened,
    rows_of,
)  # fmt: skip


def slots_of(lab) -> list[list[list[int]]]:
    """The tokens that are slots, by layer and head, by comparing bytes with those of the cold snapshot."""
    with opened(lab, SLOTS) as reader:
        assert reader.manifest.slots is not None
        counts, ids = reader.manifest.slots.counts, reader.token_ids.tolist()
    rows, at, found = rows_of(lab, SLOTS, 0)[0], 0, []
    for layer, of_layer in enumerate(counts):
        found.append([])
        for cold, n in zip(rows_of(lab, COLD, layer), of_layer, strict=True):
            places = {row.tobytes(): token for token, row in enumerate(cold)}
            stored = -(-n // 32) * 32
            own = [places[row.tobytes()] for row in rows[at : at + stored]]
            assert own == ids[at : at + stored] == [*own[:n], *own[n - 1 : n] * (stored - n)]
            assert own[:n] == sorted(set(own[:n]))
            assert not n or (own[0] >= 8 and own[-1] < N_TOKENS - 40)
            found[-1].append(own[:n])
            at += stored
    assert at == len(rows)
    return found


def start_and_build(lab, retention=RETENTION, **more):
    lab.start(n_kv_heads=2, **more)
    return built(lab.build(tokens=TOKENS, retention=retention))


def test_each_head_has_another_number_of_slots(lab):
    done = start_and_build(lab)
    assert (done.summary_tokens, done.resident_tokens) == (24, N_ROWS)
    counts = [len(own) for of_layer in slots_of(lab) for own in of_layer]
    assert sum(counts) == 24 * 4
    assert len(set(counts)) > 1
    assert done.resident_nbytes == sum(len(data) for data in files(lab, "resident", "slots"))
    assert lab.host.stats().resident_nbytes == lab.runner.document_nbytes(48, 24 * 4)


def test_slots_are_above_one_threshold(lab):
    scores: list[np.ndarray] = []

    def keep_scores(runner):
        honest = runner.replay

        def replay(*arguments):
            scores.append(honest(*arguments).numpy())
            return honest(*arguments)

        runner.replay = replay

    start_and_build(lab, prepare=keep_scores)
    of_tokens, kept = np.concatenate(scores, -1), np.zeros((2, 2, N_TOKENS - 48), bool)
    for layer, of_layer in enumerate(slots_of(lab)):
        for head, own in enumerate(of_layer):
            kept[layer, head, np.array(own, int) - 8] = True
    assert of_tokens[kept].min() > of_tokens[~kept].max()


def test_an_answer_depends_on_the_slots_and_a_restart_does_not_change_it(lab):
    start_and_build(lab)
    bare = replace(RETENTION, summary_tokens=0)
    first = lab.done(lab.ask(tokens=TOKENS, retention=RETENTION))
    follow = lab.done(lab.ask(turns=[TurnRef("kv1", first.token_ids)], tokens=TOKENS, retention=RETENTION, kv_id=""))
    lab.host.close()
    lab.start(n_kv_heads=2)
    again = lab.ask(tokens=TOKENS, retention=RETENTION, kv_id="", session="x")
    assert (lab.started(again).source, lab.started(again).restored_tokens) == ("disk", N_ROWS)
    assert lab.done(again).token_ids == first.token_ids
    turn = TurnRef("kv1", first.token_ids)
    other = lab.ask(turns=[turn], tokens=TOKENS, retention=RETENTION, kv_id="", session="y")
    assert lab.done(other).token_ids == follow.token_ids
    assert lab.started(other).miss_reason is None
    assert lab.host.stats().resident_nbytes == lab.runner.document_nbytes(48, 24 * 4)
    assert lab.failed(lab.ask(tokens=TOKENS, retention=bare)).code == "snapshot_miss"
    assert built(lab.build(tokens=TOKENS, retention=bare)).summary_tokens == 0
    assert lab.done(lab.ask(tokens=TOKENS, retention=bare, kv_id="")).token_ids != first.token_ids


@pytest.mark.parametrize("how", ["bytes", "gone", "canary"])
def test_of_damaged_slots_only_what_is_resident_is_made_again(lab, how):
    start_and_build(lab)
    before = files(lab), files(lab, "resident", "slots")
    answer = lab.done(lab.ask(tokens=TOKENS, retention=RETENTION, kv_id="")).token_ids
    lab.host.close()
    if how == "bytes":
        damage(lab.shards("slots")[0], -40)
    elif how == "gone":
        lab.store.delete(SLOTS)
    lab.start(n_kv_heads=2)
    if how == "canary":
        honest = lab.runner.load_slots

        def wrong(document, layer, records):
            honest(document, layer, memoryview(bytes(len(records))))

        lab.runner.load_slots = wrong
    refusal = lab.failed(lab.ask(tokens=TOKENS, retention=RETENTION))
    reason = {"bytes": "checksum", "gone": "absent", "canary": "canary"}[how]
    assert (refusal.code, refusal.miss_reason) == ("snapshot_miss", reason)
    lab.host.close()
    lab.start(n_kv_heads=2)
    done = built(lab.build(tokens=TOKENS, retention=RETENTION))
    assert (done.prefilled_tokens, done.already) == (0, False)
    assert (files(lab), files(lab, "resident", "slots")) == before
    assert lab.done(lab.ask(tokens=TOKENS, retention=RETENTION, kv_id="")).token_ids == answer


def test_slots_of_other_rows_are_made_again(lab):
    """As after another choice of retention whose build was killed between the two snapshots."""
    start_and_build(lab)
    lab.store.delete(RESIDENT)
    refusal = built(lab.build(tokens=TOKENS, retention=replace(RETENTION, summary_tokens=8)))
    assert (refusal.prefilled_tokens, refusal.already, refusal.summary_tokens) == (0, False, 8)
    assert sum(len(own) for of_layer in slots_of(lab) for own in of_layer) == 8 * 4


def test_an_engine_without_slots_keeps_no_summary(lab, caplog):
    caplog.set_level("INFO")
    done = start_and_build(lab, ragged_slots=False)
    assert (done.summary_tokens, done.resident_tokens, lab.host.info.has_slots) == (0, 48, False)
    assert "no summary of 24 tokens is kept" in caplog.text
    assert not lab.shards("slots")
    assert [e.name.key.kind for e in lab.store.entries()] == ["document", "resident"]
    lab.done(lab.ask(tokens=TOKENS, retention=RETENTION))
    whole = built(lab.build(tokens=TOKENS, retention=replace(RETENTION, summary_tokens=N_TOKENS)))
    assert whole.resident_tokens == N_TOKENS


def test_documents_go_with_their_slots(lab):
    start_and_build(lab)
    lab.store.delete(COLD)
    assert lab.store.entries() == []


def test_a_document_with_slots_leaves_a_device_without_a_copy(lab):
    def with_copies(runner):
        runner.host_copies = FakeCopies(runner, 1 << 30)

    lab.start(n_kv_heads=2)
    budget = lab.runner.document_nbytes(264)
    lab.host.close()
    start_and_build(lab, prepare=with_copies, budget=budget)
    answer = lab.done(lab.ask(tokens=TOKENS, retention=RETENTION, kv_id="")).token_ids
    other = type(lab.DOC)("own", "other")
    lab.build(other, TOKENS[:250])
    assert lab.host.stats().host_documents == 0
    events = lab.ask(tokens=TOKENS, retention=RETENTION, kv_id="", session="x")
    assert (lab.started(events).source, lab.done(events).token_ids) == ("disk", answer)


def test_room_for_slots_is_asked_for(lab):
    lab.start(n_kv_heads=2)
    rows = lab.runner.document_nbytes(264)
    lab.host.close()
    lab.start(n_kv_heads=2, budget=rows)
    asked = replace(RETENTION, summary_tokens=600)
    assert "budget" in lab.failed(lab.build(tokens=TOKENS, retention=asked)).detail
    assert built(lab.build(tokens=TOKENS, retention=replace(RETENTION, summary_tokens=200))).summary_tokens == 200
