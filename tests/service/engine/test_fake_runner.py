import time

import numpy as np
import pytest
import torch

from cache_store.codec import decode_records
from cache_store.layout import KVType
from service.engine.fake_runner import FakeRunner
from service.engine.protocol import Rows

TOKENS = [7 * i % 251 for i in range(40)]


def runner(**more) -> FakeRunner:
    return FakeRunner(block_tokens=8, chunk_tokens=16, **more)


def prefilled(r: FakeRunner, tokens=TOKENS):
    document, blocks = r.new_document(len(tokens)), []
    for first in range(0, len(tokens), r.limits.chunk_tokens):
        blocks += r.prefill_chunk(document, tokens[first : first + r.limits.chunk_tokens])
    return document, blocks


def restored(r: FakeRunner, blocks, tokens=TOKENS):
    document = r.new_document(len(tokens))
    for layer in range(r.layout.n_layers):
        records = memoryview(b"".join(bytes(block[layer]) for block in blocks))
        r.load_blocks(document, layer, 0, records, len(tokens))
    r.finish_load(document, len(tokens))
    return document


def question(r: FakeRunner, document, tokens=(3, 4, 5)) -> torch.Tensor:
    slot = r.new_tail()
    (logits,) = r.forward([Rows(slot, document, [TOKENS[-1], *tokens], refeed=True)])
    r.free_tail(slot)
    return logits


@pytest.mark.parametrize("kv_type", list(KVType))
def test_records_have_the_size_of_the_layout_and_restore_to_the_same_logits(kv_type):
    r = runner(kv_type=kv_type)
    document, blocks = prefilled(r)
    assert [len(b[0]) for b in blocks] == [r.layout.record_nbytes(8)] * 5
    assert torch.equal(question(r, document), question(r, restored(r, blocks)))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("block", [0, 2, 4])
def test_any_damaged_block_changes_every_row_of_logits(layer, block):
    r = runner()
    document, blocks = prefilled(r)
    damaged = [[bytearray(record) for record in b] for b in blocks]
    damaged[block][layer][-2] ^= 4
    assert not torch.isclose(question(r, document), question(r, restored(r, damaged))).all(dim=1).any()


def test_swapped_blocks_change_the_logits():
    r = runner()
    document, blocks = prefilled(r)
    swapped = [blocks[1], blocks[0], *blocks[2:]]
    assert not torch.equal(question(r, document), question(r, restored(r, swapped)))


def test_prefill_resumed_from_loaded_blocks_gives_the_same_blocks():
    r = runner()
    _, blocks = prefilled(r)
    document = r.new_document(len(TOKENS))
    for layer in range(2):
        r.load_blocks(document, layer, 0, memoryview(b"".join(bytes(b[layer]) for b in blocks[:2])), 16)
    r.finish_load(document, 16)
    assert r.prefill_chunk(document, TOKENS[16:32]) == blocks[2:4]


def test_going_on_after_export_equals_going_on_after_import_but_not_without():
    r = runner()
    document, _ = prefilled(r)
    kept, raw, fresh = r.new_tail(), r.new_tail(), r.new_tail()
    r.forward([Rows(kept, document, [1, 2, 3]), Rows(raw, document, [1, 2, 3])])
    r.import_tail(fresh, r.export_tail(kept, 0, 3), 3)
    a, b, c = r.forward([Rows(slot, document, [9]) for slot in (kept, fresh, raw)])
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_rows_do_not_depend_on_the_batch():
    r = runner()
    document, _ = prefilled(r)
    alone = question(r, document)
    slots = [r.new_tail() for _ in range(3)]
    tokens = [TOKENS[-1], 3, 4, 5]
    together = r.forward([Rows(s, document, tokens, refeed=True) for s in slots])
    assert all(torch.equal(alone, logits) for logits in together)


def test_script_is_what_a_greedy_reader_sees():
    r = runner(script=[11, 12, 13])
    document, _ = prefilled(r)
    slot, seen, rows = r.new_tail(), [], [TOKENS[-1], 3, 4]
    for _ in range(3):
        (logits,) = r.forward([Rows(slot, document, rows, refeed=len(rows) > 1)])
        rows = [int(logits[-1].argmax())]
        seen += rows
    assert seen == [11, 12, 13]


def test_misuse_is_refused():
    r = runner(n_slots=1, tail_tokens=4)
    document, blocks = prefilled(r)
    with pytest.raises(ValueError, match="bytes are not"):
        r.load_blocks(document, 0, 0, memoryview(bytes(blocks[0][0])[:-1]), 8)
    half = r.new_document(16)
    r.load_blocks(half, 0, 0, memoryview(blocks[0][0]), 8)
    with pytest.raises(ValueError, match="loaded"):
        r.finish_load(half, 8)
    slot = r.new_tail()
    with pytest.raises(RuntimeError, match="no free"):
        r.new_tail()
    with pytest.raises(ValueError, match="at most 4"):
        r.forward([Rows(slot, document, [1] * 5)])
    with pytest.raises(ValueError, match="re-fed"):
        r.forward([Rows(slot, document, [(TOKENS[-1] + 1) % 251], refeed=True)])
    r.free_document(half)
    with pytest.raises(RuntimeError, match="freed"):
        r.prefill_chunk(half, [1])


def test_poisoned_tokens_give_nan():
    r = runner()
    r.poisoned.add(4)
    document, _ = prefilled(r)
    assert np.isnan(question(r, document).numpy()).any(axis=1).tolist() == [False, False, True, False]


def rows_of(r: FakeRunner, blocks, layer):
    """Decoded keys [heads, n, dim] of blocks."""
    n = sum(len(block[layer]) for block in blocks) // r.layout.record_nbytes(1)
    keys, values = torch.empty(2, r.layout.n_kv_heads, n, 32)
    records = memoryview(b"".join(bytes(block[layer]) for block in blocks))
    decode_records(records, n, r.layout, out_k=keys, out_v=values, rotated=r.layout.kv_type is not KVType.FP16)
    return keys


@pytest.mark.parametrize("kv_type", list(KVType))
def test_the_query_of_a_token_finds_the_tokens_that_equal_it(kv_type):
    r = runner(kv_type=kv_type, n_layers=3, n_kv_heads=2)
    document, blocks = prefilled(r)
    slot = r.new_tail()
    heads = [(2, 1), (0, 0)]
    queries = r.question_queries(Rows(slot, document, [TOKENS[-1], TOKENS[9], 400], refeed=True), heads)
    assert queries.shape == (2, 2, 3, 32)
    assert r.tail_length(slot) == 0
    for (layer, head), own in zip(heads, queries, strict=True):
        scores = own @ rows_of(r, blocks, layer)[head].T
        assert scores[:, 0].argmax(-1).tolist() == [39, 39]
        assert scores[:, 1].argmax(-1).tolist() == [9, 9]
        assert (scores[:, 2] < scores[0, 1].max() / 2 + 8).all()


def gathered(r: FakeRunner, blocks, rows, positions):
    """A resident document of picked rows, [heads, n] places by head."""
    n = rows.shape[1]
    document = r.new_document(n)
    for layer in range(r.layout.n_layers):
        whole = r._rows.decode(memoryview(b"".join(bytes(b[layer]) for b in blocks)), len(TOKENS))
        picked = np.take_along_axis(whole, rows[:, :, None], 1)
        records = b"".join(bytes(b[0]) for b in r._rows.encode(picked[None]))
        r.load_blocks(document, layer, 0, memoryview(records), n)
    r.finish_load(document, n, next_position=positions[0], last_position=positions[1])
    return document


def test_resident_rows_and_positions_are_in_the_logits():
    r = runner(n_kv_heads=2)
    document, blocks = prefilled(r)
    whole = gathered(r, blocks, np.tile(np.arange(40), (2, 1)), (40, 39))
    assert torch.equal(question(r, document), question(r, whole))
    picked = np.array([[0, 1, 7, 20, 38, 39], [0, 1, 3, 9, 38, 39]])
    answers = [question(r, gathered(r, blocks, picked, (40, 39)))]
    other = picked.copy()
    other[1, 2] = 4
    answers += [question(r, gathered(r, blocks, other, (40, 39)))]
    answers += [question(r, gathered(r, blocks, picked, (41, 39)))]
    for i, a in enumerate(answers):
        assert not any(torch.equal(a, b) for b in answers[:i])


def test_fetched_rows_are_seen_but_do_not_move_positions():
    r = runner(n_kv_heads=2)
    document, blocks = prefilled(r)
    slots = [r.new_tail() for _ in range(3)]
    for slot in slots:
        r.forward([Rows(slot, document, [5, 6])])
    r.import_tail(slots[0], blocks[1:2], 8, fetched=True)
    r.import_tail(slots[1], blocks[2:3], 8, fetched=True)
    with pytest.raises(ValueError, match="already"):
        r.import_tail(slots[0], blocks[2:3], 8, fetched=True)
    batch = [Rows(slot, document, [TOKENS[-1], 9, 10], refeed=True) for slot in slots]
    logits = r.forward(batch)
    assert all(torch.equal(x[0], logits[0][0]) for x in logits)
    assert not torch.isclose(logits[0][1:], logits[1][1:]).any()
    assert not torch.isclose(logits[0][1:], logits[2][1:]).any()
    tails = [r._tails[slot] for slot in slots]
    assert [r._rows.position_of(t.rows, t.n_tokens - 1) for t in tails] == [43] * 3
    before = tails[0].rows[:, :, :2].copy()
    written = tails[0].rows[:, :, 10:12].copy()
    r.drop_fetched(slots[0])
    r.drop_fetched(slots[2])
    assert [r.tail_length(slot) for slot in slots] == [4, 12, 4]
    assert np.array_equal(tails[0].rows[:, :, :4], np.concatenate((before, written), 2))
    r.forward([Rows(slots[0], document, [11])])
    assert r._rows.position_of(tails[0].rows, 4) == 44


def test_a_segment_goes_on_behind_the_sinks_alone():
    r = runner()
    document, blocks = prefilled(r)
    r.keep_prefix(document, 4)
    assert (document.n_tokens, document.next_position, document.last_position) == (4, 4, 3)
    segment = r.prefill_chunk(document, TOKENS[16:32]) + r.prefill_chunk(document, TOKENS[32:36])
    again = r.new_document(24)
    for layer in range(2):
        r.load_blocks(again, layer, 0, memoryview(r._rows.encode(document.rows[:, :, :4])[0][layer]), 4)
    r.finish_load(again, 4)
    r.keep_prefix(again, 4)
    for layer in range(2):
        r.load_blocks(again, layer, 4, memoryview(b"".join(bytes(b[layer]) for b in segment[:2])), 16)
    r.finish_load(again, 20)
    assert r.prefill_chunk(again, TOKENS[32:36]) == segment[2:]
    assert segment[0] != blocks[2]
    with pytest.raises(ValueError, match="keep"):
        r.keep_prefix(document, 25)
    with pytest.raises(ValueError, match="keep"):
        FakeRunner(sink_multiple=4).keep_prefix(document, 6)


def test_replay_scores_what_is_repeated_higher():
    r, calls = runner(n_layers=3, n_kv_heads=2), []
    document, _ = prefilled(r)
    scores = r.replay(document, [300, *TOKENS[20:24]], 4, 16, 32, lambda: calls.append(1))
    assert scores.shape == (3, 2, 16)
    assert scores.dtype == torch.float32
    assert len(calls) == 3
    assert (scores[..., 4:8] > 0.5).all()
    assert (scores[..., :4] < 0.5).all()
    assert torch.equal(scores, r.replay(document, TOKENS[20:24], 4, 16, 32))
    with pytest.raises(ValueError, match="sinks"):
        r.replay(document, TOKENS[20:24], 17, 16, 32)


def test_its_pace_is_set_for_each_row_and_each_block():
    r = runner(step_delay_s=0.01, row_delay_s=0.01, load_delay_s=0.01)
    document, blocks = prefilled(r)
    began = time.monotonic()
    question(r, document)
    asked = time.monotonic()
    restored(r, blocks)
    assert asked - began >= 0.05
    assert time.monotonic() - asked >= 0.01 * 5 * r.layout.n_layers
