"""The bytes of llama.cpp's states, without llama.cpp: `make llamacpp` holds them against its own."""

import struct

import numpy as np
import pytest

from cache_store.layout import KVLayout, KVType
from service.engine.llama_engine.state import MAGIC, KVRows, StateFormat, StateMismatch

LAYOUTS = [KVLayout(3, 2, 64, kind, block_tokens=8) for kind in KVType]


def filled(form: StateFormat, n_tokens: int, first: int = 0) -> np.ndarray:
    state = form.new(n_tokens, first)
    rows, random = form.rows(state, n_tokens), np.random.default_rng(7)
    for part in (rows.keys, rows.values):
        part[:] = random.integers(0, 256, part.shape, np.uint8)
    return state


def joined(form: StateFormat, rows: KVRows) -> list[memoryview]:
    blocks = form.records(rows)
    return [memoryview(b"".join(bytes(block[layer]) for block in blocks)) for layer in range(form.layout.n_layers)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.kv_type)
def test_records_have_the_size_of_the_layout_and_make_the_same_state(layout):
    form = StateFormat(layout)
    state = filled(form, 20)
    rows = form.read(state, 0, 20)
    assert [len(block[0]) for block in form.records(rows)] == [layout.record_nbytes(n) for n in (8, 8, 4)]
    again = form.new(20)
    for layer, records in enumerate(joined(form, rows)):
        form.put(form.rows(again, 20), layer, 0, records, 20)
    assert bytes(again) == bytes(state)


def test_records_put_in_parts_make_the_same_state():
    form = StateFormat(LAYOUTS[1])
    state = filled(form, 20)
    again = form.new(20)
    for layer, records in enumerate(joined(form, form.read(state, 0, 20))):
        cut = 2 * form.layout.record_nbytes(8)
        form.put(form.rows(again, 20), layer, 16, records[cut:], 4)
        form.put(form.rows(again, 20), layer, 0, records[:cut], 16)
    assert bytes(again) == bytes(state)


def test_cells_in_another_order_are_read_in_the_order_of_their_positions():
    form = StateFormat(LAYOUTS[0])
    state = filled(form, 6, first=40)
    order = np.array([2, 0, 1, 5, 4, 3])
    turned = form.new(6)
    turned[16:88].view("<i4").reshape(6, 3)[:] = state[16:88].view("<i4").reshape(6, 3)[order]
    before, after = form.rows(state, 6), form.rows(turned, 6)
    after.keys[:], after.values[:] = before.keys[:, order], before.values[:, order]
    found = form.read(turned, 40, 6)
    assert (found.keys == before.keys).all()
    assert (found.values == before.values).all()


@pytest.mark.parametrize("at", [0, 8, 12, 16, 64, 68, 72, 76])
def test_a_state_of_another_form_is_not_read(at):
    """Magic, streams, cells, a position, V transposed, layers, type and row size."""
    form = StateFormat(LAYOUTS[0])
    state = filled(form, 4)
    state[at] ^= 1
    with pytest.raises(StateMismatch):
        form.read(state, 0, 4)


def test_a_state_of_another_length_is_not_read():
    form = StateFormat(LAYOUTS[0])
    assert struct.unpack_from("<I", filled(form, 4))[0] == MAGIC
    with pytest.raises(StateMismatch, match="bytes for 5 tokens"):
        form.read(filled(form, 4), 0, 5)


def test_records_of_another_size_are_not_put():
    form = StateFormat(LAYOUTS[0])
    rows = form.rows(form.new(8), 8)
    with pytest.raises(ValueError, match="do not take"):
        form.put(rows, 0, 0, memoryview(bytes(form.layout.record_nbytes(8) - 1)), 8)
    with pytest.raises(ValueError, match="of 8"):
        form.put(rows, 0, 4, memoryview(bytes(form.layout.record_nbytes(8))), 8)
