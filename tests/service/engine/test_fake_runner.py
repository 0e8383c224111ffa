import numpy as np
import pytest
import torch

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
