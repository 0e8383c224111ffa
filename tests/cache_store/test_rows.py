"""Picked rows are the very bytes of their tokens: compared with what the codec decodes, and byte by byte."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cache_store.codec import decode_records, encode_records
from cache_store.layout import KVLayout, KVType
from cache_store.rows import take_head_rows, take_rows
from cache_store.slots import slot_layout, stored_rows

TYPES = list(KVType)


def layout_of(kv_type: KVType, n_kv_heads: int = 3, block_tokens: int = 8, head_dim: int = 64) -> KVLayout:
    return KVLayout(2, n_kv_heads, head_dim, kv_type, block_tokens)


def encoded(layout: KVLayout, n_tokens: int, seed: int = 0) -> list[memoryview]:
    shape = (2, layout.n_kv_heads, n_tokens, layout.head_dim)
    k, v = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return encode_records(k, v, layout)


def joined(records: Sequence[memoryview]) -> memoryview:
    return memoryview(b"".join(records))


def decoded(records: Sequence[memoryview], n_tokens: int, layout: KVLayout) -> Tensor:
    """``[2, n_kv_heads, n_tokens, head_dim]``, keys and values."""
    out = torch.empty(2, layout.n_kv_heads, n_tokens, layout.head_dim)
    decode_records(bytearray(joined(records)), n_tokens, layout, out_k=out[0], out_v=out[1])
    return out


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kv_type=st.sampled_from(TYPES), heads=st.integers(1, 4), n_tokens=st.integers(1, 40))
def test_rows_decode_to_the_picked_tokens(data: st.DataObject, kv_type: KVType, heads: int, n_tokens: int) -> None:
    layout = layout_of(kv_type, heads)
    records = encoded(layout, n_tokens)
    place = st.integers(0, n_tokens - 1)
    n = data.draw(st.integers(0, 30))
    if data.draw(st.booleans()):
        rows = np.array(data.draw(st.lists(place, min_size=n, max_size=n)), np.int64)
        of_head = np.stack([rows] * heads)
    else:
        of_head = rows = np.array(data.draw(st.lists(place, min_size=n * heads, max_size=n * heads)), np.int64)
        of_head = rows = rows.reshape(heads, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cache_store.rows._JOINED_NBYTES", data.draw(st.sampled_from([0, 5000, 1 << 20])))
        taken = take_rows(cut(data, records), n_tokens, layout, rows)
    assert [r.nbytes for r in taken] == [layout.record_nbytes(length) for length in layout.block_lengths(n)]
    source, found = decoded(records, n_tokens, layout), decoded(taken, n, layout)
    for head in range(heads):
        assert torch.equal(found[:, head], source[:, head, torch.from_numpy(of_head[head])])


def cut(data: st.DataObject, records: list[memoryview]) -> memoryview | list[memoryview]:
    """The records in one piece, or in several of whole records."""
    if data.draw(st.booleans()):
        return joined(records)
    ends = sorted(data.draw(st.sets(st.integers(1, len(records)))) | {len(records)})
    return [joined(records[first:last]) for first, last in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("kv_type", TYPES)
@pytest.mark.parametrize("n_tokens", [8, 24, 29])
def test_all_rows_in_order_are_the_records_themselves(kv_type: KVType, n_tokens: int) -> None:
    layout = layout_of(kv_type)
    records = encoded(layout, n_tokens)
    assert joined(take_rows(records, n_tokens, layout, np.arange(n_tokens))) == joined(records)


@pytest.mark.parametrize("kv_type", TYPES)
def test_taking_in_two_steps_is_taking_once(kv_type: KVType) -> None:
    layout = layout_of(kv_type)
    rng = np.random.default_rng(1)
    records = encoded(layout, 50)
    first, second = rng.integers(0, 50, (3, 30)), rng.integers(0, 30, (3, 20))
    steps = take_rows(take_rows(records, 50, layout, first), 30, layout, second)
    once = take_rows(records, 50, layout, np.take_along_axis(first, second, 1))
    assert joined(steps) == joined(once)


def test_what_was_taken_can_be_decoded_in_place() -> None:
    layout = layout_of(KVType.K8V4, block_tokens=256)
    (record,) = take_rows(encoded(layout, 300), 300, layout, np.arange(250, 260))
    assert not record.readonly
    assert record.contiguous
    assert record.format == "B"


@pytest.mark.parametrize(
    ("rows", "n_tokens", "match"),
    [
        (np.array([0, 20]), 20, "among 20"),
        (np.array([-1]), 20, "among 20"),
        (np.array([0.0]), 20, "integers"),
        (np.array([[[0]]]), 20, "integers"),
        (np.array([[0], [1]]), 20, "2 heads"),
        (np.array([0]), 19, "whole records"),
        (np.array([0]), 21, "whole records"),
        (np.array([0]), 16, "whole records"),
        (np.array([0]), 28, "whole records"),
        (np.array([0]), 4, "whole records"),
    ],
    ids=str,
)
def test_rows_and_sizes_that_do_not_fit(rows: np.ndarray, n_tokens: int, match: str) -> None:
    layout = layout_of(KVType.K8V4)
    with pytest.raises(ValueError, match=match):
        take_rows(joined(encoded(layout, 20)), n_tokens, layout, rows)


def test_missing_records_are_found() -> None:
    layout = layout_of(KVType.K8V4)
    records = encoded(layout, 20)
    for wrong in (records[:2], records[1:], [], [*records, records[0]]):
        with pytest.raises(ValueError, match="records"):
            take_rows(wrong, 20, layout, np.array([0]))


@settings(max_examples=80, deadline=None)
@given(data=st.data(), kv_type=st.sampled_from(TYPES), heads=st.integers(1, 4), n_tokens=st.integers(1, 40))
def test_rows_of_a_head_decode_to_its_picked_tokens(
    data: st.DataObject, kv_type: KVType, heads: int, n_tokens: int
) -> None:
    layout, head = layout_of(kv_type, heads), data.draw(st.integers(0, heads - 1))
    records, own = encoded(layout, n_tokens), slot_layout(layout)
    rows = np.array(data.draw(st.lists(st.integers(0, n_tokens - 1), max_size=70)), np.int64)
    taken = take_head_rows(cut(data, records), n_tokens, layout, head, rows)
    n = stored_rows(len(rows))
    assert [r.nbytes for r in taken] == [own.record_nbytes(32)] * (n // 32)
    filled = np.concatenate((rows, np.repeat(rows[-1:], n - len(rows))))
    source = decoded(records, n_tokens, layout)[:, head, torch.from_numpy(filled)]
    assert torch.equal(decoded(taken, n, own)[:, 0], source)


@pytest.mark.parametrize(("head", "rows"), [(3, [0]), (-1, [0]), (0, [8]), (0, [-1]), (0, [[0]]), (0, [0.5])])
def test_rows_of_a_head_that_are_none(head: int, rows: list) -> None:
    layout = layout_of(KVType.K8V8)
    with pytest.raises(ValueError, match="rows"):
        take_head_rows(encoded(layout, 8), 8, layout, head, np.array(rows))
