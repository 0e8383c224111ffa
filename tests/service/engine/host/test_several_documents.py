"""Answers from several documents: rows of each in one document of the runner, the rest fetched from all of them."""

import numpy as np
import pytest

from cache_store.keys import SnapshotKey
from service.engine.digests import digest_of
from service.engine.fake_rows import FakeRows
from service.engine.host.kept import holds, scratch_ref, together_ref
from service.engine.messages import AnswerRequest, DocumentRef, PartRef, Sampling, SpanRef, TurnRef
from tests.service.engine.host.host_copies import FakeCopies
from tests.service.engine.host.windowed import MARK, RETENTION, built

REFS = [DocumentRef("own", name) for name in ("one", "two", "three")]
LENGTHS = [300, 1000, 143]
RETENTIONS = [None, RETENTION, None]
RANGES = [[(0, 20), (290, 300)], [(4, 20), (980, 1000)], [(4, 20), (130, 143)]]
N_ROWS = sum(last - first for ranges in RANGES for first, last in ranges)
N_TOKENS = sum(LENGTHS)
FETCH = 96
NEXT = 8 + 256 + 256
"""The longest is the first: behind its 300 tokens, and the gap."""


def texts(marks=()) -> list[list[int]]:
    """Tokens of the documents, which begin alike; `marks`: document, place, token."""
    made = [[(i * i * (n + 3) + 7 * i) % 241 + 2 for i in range(length)] for n, length in enumerate(LENGTHS)]
    for tokens in made:
        tokens[:4] = [9, 8, 7, 6]
    for document, place, token in marks:
        made[document][place] = token
    return made


def build(lab, made) -> None:
    for ref, tokens, retention in zip(REFS, made, RETENTIONS, strict=True):
        built(lab.build(ref, tokens=tokens, retention=retention))


def parts_of(made, ranges=RANGES) -> list[PartRef]:
    return [
        PartRef(ref, digest_of(tokens), len(tokens), list(resident), retention)
        for ref, tokens, resident, retention in zip(REFS, made, ranges, RETENTIONS, strict=True)
    ]


def ask(lab, parts, prompt=(MARK, 1), turns=(), *, session="s", kv_id="", max_tokens=5) -> list:
    events: list = []
    request = AnswerRequest(
        "a", session, parts[0].document, "", sum(part.n_tokens for part in parts), list(turns), list(prompt),
        Sampling(max_tokens), kv_id, parts=list(parts), fetch_tokens=FETCH,
    )  # fmt: skip
    lab.host.answer(request, events.append).result(60)
    return events


def turn(lab, events, kv_id) -> TurnRef:
    return TurnRef(kv_id, lab.done(events).token_ids, lab.started(events).spans)


@pytest.mark.parametrize(("document", "place"), [(0, 100), (1, 530), (1, 900), (2, 60)])
def test_a_question_fetches_the_span_it_names_from_the_document_that_has_it(lab, document, place):
    made = texts([(document, place, MARK)])
    lab.start()
    build(lab, made)
    started = lab.started(ask(lab, parts_of(made)))
    assert any(s.document == document and s.first <= place < s.first + s.n_tokens for s in started.spans)
    assert sum(span.n_tokens for span in started.spans) <= FETCH
    assert [s.document for s in started.spans] == sorted(s.document for s in started.spans)
    resident = {
        (n, token) for n, ranges in enumerate(RANGES) for pair in ranges for token in (*range(4), *range(*pair))
    }
    assert not any(
        (s.document, token) in resident for s in started.spans for token in range(s.first, s.first + s.n_tokens)
    )
    assert (started.source, started.restored_tokens, started.reused_tokens) == ("disk", N_ROWS, N_TOKENS)
    assert (started.prefilled_tokens, started.first_pass_tokens) == (2, 2)


def test_the_rows_are_those_of_the_cold_snapshots(lab):
    made = texts([(1, 530, MARK)])
    lab.start()
    build(lab, made)
    taken, honest = [], lab.runner.import_tail

    def import_tail(slot, blocks, n_tokens, **more):
        taken.append((blocks, n_tokens))
        honest(slot, blocks, n_tokens, **more)

    lab.runner.import_tail = import_tail
    started = lab.started(ask(lab, parts_of(made)))
    entry = lab.host._context.residency._entries[together_ref(REFS)]
    cold = [cold_rows(lab, ref) for ref in REFS]
    expected = np.concatenate([cold[n][:, :, a:b] for n, ranges in enumerate(RANGES) for a, b in ranges], 2)
    assert (entry.handle.rows == expected).all()
    assert (entry.next_position, entry.last_token) == (556, made[2][-1])
    (blocks, n_tokens), at = taken[0], 0
    for layer in range(2):
        data = memoryview(b"".join(bytes(block[layer]) for block in blocks))
        rows, at = FakeRows(lab.runner.layout).decode(data, n_tokens), 0
        for span in started.spans:
            part = cold[span.document][layer, :, span.first : span.first + span.n_tokens]
            assert (rows[:, at : at + span.n_tokens] == part).all()
            at += span.n_tokens


def cold_rows(lab, ref) -> np.ndarray:
    """``[layers, heads, tokens, width]``."""
    rows = FakeRows(lab.runner.layout)
    with lab.store.open(
        SnapshotKey("own", "document", ref.document_id), lab.runner.fingerprint, lab.runner.layout
    ) as r:
        return np.stack(
            [np.concatenate([rows.decode(rec, n) for _, _, rec, n in r.read_layer(layer)], 1) for layer in range(2)]
        )


def test_a_restart_changes_nothing_and_computes_no_token_of_a_document(lab):
    made = texts([(1, 530, MARK), (2, 60, MARK + 1)])
    parts = parts_of(made)
    lab.start()
    build(lab, made)
    first = ask(lab, parts, kv_id="k1")
    second = ask(lab, parts, [*lab.done(first).pending_ids, MARK + 1], [turn(lab, first, "k1")], kv_id="k2")
    turns = [turn(lab, first, "k1"), turn(lab, second, "k2")]
    third = ask(lab, parts, [*lab.done(second).pending_ids, 7], turns)
    assert [{span.document for span in lab.started(events).spans} for events in (first, second)] == [{1}, {2}]
    lab.host.close()
    lab.start()
    again = ask(lab, parts, [*lab.done(second).pending_ids, 7], turns, session="other")
    assert lab.started(again).miss_reason is None
    assert lab.started(again).reused_tokens == N_TOKENS + sum(len(each.token_ids) for each in turns)
    assert lab.started(again).spans == lab.started(third).spans
    assert lab.done(again).token_ids == lab.done(third).token_ids
    assert lab.host.stats().document_prefill_tokens_total == 0
    lost = [TurnRef("", each.token_ids, each.spans) for each in turns]
    computed = ask(lab, parts, [*lab.done(second).pending_ids, 7], lost, session="x")
    assert lab.started(computed).miss_reason == "absent"
    assert lab.done(computed).token_ids == lab.done(third).token_ids


def test_turns_over_other_rows_are_not_gone_on_with(lab):
    made = texts([(1, 530, MARK)])
    lab.start()
    build(lab, made)
    first = ask(lab, parts_of(made), kv_id="k1")
    seen = turn(lab, first, "k1")
    assert lab.started(ask(lab, parts_of(made), [7], [seen], session="z")).miss_reason is None
    other = parts_of(made, [RANGES[0], RANGES[1], [(4, 19), (130, 143)]])
    assert lab.started(ask(lab, other, [7], [seen])).miss_reason == "checksum"
    for document in (0, 1):
        moved = TurnRef("k1", seen.token_ids, [SpanRef(96, 8, document)])
        assert lab.started(ask(lab, parts_of(made), [7], [moved], session="y")).miss_reason == "checksum"


@pytest.mark.parametrize(("damaged", "layer"), [(0, 0), (1, 1), (2, 0)])
def test_damage_is_a_miss_that_names_the_document(lab, damaged, layer):
    made = texts([(1, 530, MARK)])
    lab.start()
    build(lab, made)
    expected = ask(lab, parts_of(made))
    lab.host.close()
    lab.start()
    (shard,) = lab.root.glob(f"snapshots/own/documents/{REFS[damaged].document_id}/*/shard-*")
    with lab.store.open(
        SnapshotKey("own", "document", REFS[damaged].document_id), lab.runner.fingerprint, lab.runner.layout
    ) as reader:
        record = bytes(reader.read_blocks([1])[0][layer])
    data = bytearray(shard.read_bytes())
    data[data.index(record) + 5] ^= 1
    shard.write_bytes(data)
    refusal = lab.failed(ask(lab, parts_of(made)))
    assert (refusal.code, refusal.miss_reason) == ("snapshot_miss", "checksum")
    assert refusal.document_id == REFS[damaged].document_id
    built(lab.build(REFS[damaged], tokens=made[damaged], retention=RETENTIONS[damaged]))
    assert lab.host.stats().document_prefill_tokens_total == LENGTHS[damaged]
    assert lab.done(ask(lab, parts_of(made))).token_ids == lab.done(expected).token_ids


def test_a_missing_document_is_named(lab):
    made = texts()
    lab.start()
    built(lab.build(REFS[0], tokens=made[0]))
    refusal = lab.failed(ask(lab, parts_of(made)))
    assert (refusal.miss_reason, refusal.document_id) == ("absent", "two")


def test_a_released_document_takes_what_has_its_rows_along(lab):
    made = texts()
    lab.start()
    build(lab, made)
    ask(lab, parts_of(made))
    assert lab.host.stats().resident_documents == 4
    released = lab.host.release(REFS[2])
    assert released.objects == 3
    stats = lab.host.stats()
    assert (stats.resident_documents, stats.index_documents, stats.tail_slots_used) == (2, 2, 0)


def test_names_of_what_is_counted():
    together = together_ref(REFS)
    assert all(holds(together, ref) and holds(ref, ref) and holds(scratch_ref(ref), ref) for ref in REFS)
    others = [DocumentRef("own", "on"), DocumentRef("own", "e"), DocumentRef("other", "one")]
    assert not any(holds(together, ref) for ref in others)


def test_what_comes_back_from_the_hosts_memory_must_agree(lab):
    made = texts([(1, 530, MARK)])

    def with_copies(runner) -> None:
        runner.host_copies = FakeCopies(runner, 1 << 30)

    lab.start(prepare=with_copies)
    build(lab, made)
    expected = ask(lab, parts_of(made))
    context = lab.host._context
    entry = context.residency._entries[together_ref(REFS)]
    assert context.host_tier is not None
    context.host_tier.keep(entry)
    context.residency.drop(together_ref(REFS))
    again = ask(lab, parts_of(made), session="other")
    assert lab.started(again).source == "host"
    assert lab.done(again).token_ids == lab.done(expected).token_ids
    context.residency.drop(together_ref(REFS))
    honest = lab.runner._logits
    lab.runner._logits = lambda *a: honest(*a) + 1
    refusal = lab.failed(ask(lab, parts_of(made), session="third"))
    assert (refusal.miss_reason, refusal.document_id) == ("canary", None)
    lab.runner._logits = honest
    assert lab.started(ask(lab, parts_of(made), session="third")).source == "disk"


@pytest.mark.parametrize("ranges", [[], [(0, 20)], [(20, 300), (0, 20)], [(-1, 300)], [(0, 301)]])
def test_ranges_that_are_none_are_refused(lab, ranges):
    made = texts()
    lab.start()
    refusal = lab.failed(ask(lab, parts_of(made, [ranges, *RANGES[1:]])))
    assert (refusal.code, "ranges" in refusal.detail) == ("internal", True)
