"""Where the tokens of a document in segments stand, and that snapshots say it and are checked against it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cache_store.errors import MissReason, SnapshotMiss
from cache_store.layout import KVLayout, KVType
from cache_store.segments import WHOLE, Segments
from cache_store.store import SnapshotStore
from tests.cache_store.damage import expect_miss
from tests.cache_store.recipes import CANARY, FINGERPRINT, KEY, LAYOUT, SEGMENTED, Recipe
from tests.cache_store.rewrite import rewrite


def test_a_document_of_one_segment_stands_at_its_own_places() -> None:
    for segments in (WHOLE, Segments(0, 4), Segments(48, 8)):
        assert segments.ranges(43) == [(0, 43)]
        assert (segments.next_position(43), segments.last_position(43)) == (43, 42)
        assert segments.of_length(43) == WHOLE
        table = segments.table(LAYOUT, 43, 100)
        assert table.first_position == [100, 108, 116, 124, 132, 140]
        assert table.segment == [0] * 6
        assert table.n_tokens == [8, 8, 8, 8, 8, 3]


def test_later_segments_stand_behind_the_sinks() -> None:
    segments = Segments(16, 3)
    assert segments.ranges(43) == [(0, 16), (16, 32), (32, 43)]
    assert [segments.position(token) for token in (0, 15, 16, 31, 32, 42)] == [0, 15, 3, 18, 3, 13]
    assert (segments.next_position(43), segments.last_position(43)) == (19, 13)
    table = segments.table(LAYOUT, 43)
    assert table.first_position == [0, 8, 3, 11, 3, 11]
    assert table.segment == [0, 0, 1, 1, 2, 2]
    assert segments.of_length(43) == segments
    assert segments.of_length(16) == WHOLE
    assert segments.of_length(17) == segments


@given(st.integers(1, 5), st.integers(0, 8), st.integers(1, 200))
def test_positions_agree_with_each_other(blocks: int, sinks: int, n_tokens: int) -> None:
    """Against the positions counted out token by token."""
    segments = Segments(8 * blocks, sinks)
    positions = np.concatenate(
        [np.arange(last - first) + (sinks if first else 0) for first, last in segments.ranges(n_tokens)]
    )
    assert [segments.position(token) for token in range(n_tokens)] == positions.tolist()
    table = segments.table(LAYOUT, n_tokens)
    assert table.first_position == positions[::8].tolist()
    assert segments.last_position(n_tokens) == positions[-1]
    assert segments.next_position(n_tokens) > positions.max()
    assert segments.n_segments(n_tokens) == len(segments.ranges(n_tokens)) == table.segment[-1] + 1
    assert [table.segment[i] for i in range(len(table.segment))] == [
        segments.segment(8 * i) for i in range(len(table.segment))
    ]


@pytest.mark.parametrize("arguments", [(-8, 0), (16, -1), (16, 17)])
def test_segments_that_cannot_be(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"negative|do not lie in"):
        Segments(*arguments)


def test_segments_are_whole_blocks_of_a_document(store: SnapshotStore) -> None:
    with pytest.raises(ValueError, match="not whole blocks"):
        Segments(20, 3).table(LAYOUT, 43)
    for tokens in (43, 10):
        with pytest.raises(ValueError, match="not whole blocks"):
            replace(SEGMENTED, segments=Segments(20, 3), n_tokens=tokens).begin(store)
    for kind in ("turn", "resident"):
        with pytest.raises(ValueError, match="only a document"):
            replace(SEGMENTED, key=KEY.of_kind(kind)).begin(store)
    with pytest.raises(ValueError, match="begins at position 0"):
        store.begin(KEY, FINGERPRINT, LAYOUT, [1] * 43, segments=Segments(16, 3), first_position=8)
    with pytest.raises(ValueError, match="begins at position 0"):
        Segments(16, 3).table(LAYOUT, 43, 8)
    assert store.entries() == []


def test_a_document_in_segments_is_stored(store: SnapshotStore) -> None:
    manifest = SEGMENTED.build(store)
    assert SEGMENTED.read(store) == SEGMENTED.blocks
    assert manifest.blocks == Segments(16, 3).table(LAYOUT, 43)
    for segments in (None, Segments(16, 3)):
        with store.open(KEY, FINGERPRINT, LAYOUT, segments=segments) as reader:
            assert reader.segments == Segments(16, 3)
            assert (reader.next_position, reader.last_position) == (19, 13)
            assert reader.canary == CANARY


@pytest.mark.parametrize("asked", [WHOLE, Segments(0, 3), Segments(16, 4), Segments(24, 3), Segments(48, 3)])
def test_other_segments_are_a_miss_and_no_damage(store: SnapshotStore, asked: Segments) -> None:
    SEGMENTED.build(store)
    with pytest.raises(SnapshotMiss, match="other segments") as miss:
        store.open(KEY, FINGERPRINT, LAYOUT, segments=asked)
    assert miss.value.reason is MissReason.FINGERPRINT
    assert [e.state for e in store.entries()] == ["published"]
    changed = replace(SEGMENTED, segments=asked)
    changed.build(store)
    assert changed.read(store) == changed.blocks
    store.open(KEY, FINGERPRINT, LAYOUT, segments=asked).close()
    assert len(store.entries()) == 1


def test_a_single_segment_is_an_ordinary_document(store: SnapshotStore, recipe: Recipe) -> None:
    """Its manifest is that of one without segments, so either retention may use it."""
    plain = recipe.build(store)
    short = replace(recipe, segments=Segments(48, 3)).build(store)
    assert structs.replace(short, created_at=plain.created_at) == plain
    for segments in (WHOLE, Segments(48, 3), Segments(64, 8)):
        with store.open(KEY, FINGERPRINT, LAYOUT, segments=segments) as reader:
            assert (reader.segments, reader.next_position, reader.last_position) == (WHOLE, 43, 42)


def test_a_turn_says_where_it_ends(store: SnapshotStore) -> None:
    turn = KEY.of_kind("turn")
    with store.begin(turn, FINGERPRINT, LAYOUT, [5] * 9, first_position=100) as builder:
        for records in Recipe(n_tokens=9).blocks:
            builder.append(records)
        builder.publish()
    with store.open(turn, FINGERPRINT, LAYOUT, segments=WHOLE) as reader:
        assert (reader.next_position, reader.last_position) == (109, 108)


@pytest.mark.parametrize("other", [WHOLE, Segments(16, 4), Segments(24, 3)])
def test_a_journal_of_other_segments_is_dropped(store: SnapshotStore, other: Segments) -> None:
    with SEGMENTED.begin(store) as builder:
        builder.append(SEGMENTED.blocks[0])
    with SEGMENTED.begin(store) as builder:
        assert builder.n_blocks_done == 1
    changed = replace(SEGMENTED, segments=other)
    with changed.begin(store) as builder:
        assert builder.n_blocks_done == 0
        builder.append(changed.blocks[0])
    with SEGMENTED.begin(store) as builder:
        assert builder.n_blocks_done == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"retention": None}, MissReason.VERSION),
        ({"retention": {"segment_tokens": 16, "sink_tokens": 4}}, MissReason.VERSION),
        ({"retention": {"segment_tokens": 24, "sink_tokens": 3}}, MissReason.VERSION),
        ({"retention": {"segment_tokens": 16, "sink_tokens": 3, "carried": 8}}, MissReason.VERSION),
        ({"retention": {"segment_tokens": 20, "sink_tokens": 3}}, MissReason.CHECKSUM),
        ({"retention": {"segment_tokens": 16, "sink_tokens": 17}}, MissReason.CHECKSUM),
        ({"retention": {"segment_tokens": 48, "sink_tokens": 3}}, MissReason.CHECKSUM),
        ({"retention": {"segment_tokens": 0, "sink_tokens": 3}}, MissReason.CHECKSUM),
        ({"retention": {"segment_tokens": 1 << 40, "sink_tokens": 3}}, MissReason.CHECKSUM),
        ({"retention": {"segment_tokens": "16", "sink_tokens": 3}}, MissReason.CHECKSUM),
        ({"retention": {"segment_tokens": 16}}, MissReason.CHECKSUM),
        ({"retention": [16, 3]}, MissReason.CHECKSUM),
        ({"next_position": 18}, MissReason.VERSION),
        ({"next_position": 43}, MissReason.VERSION),
        ({"sections": {"resident": {"last_position": 13}}}, MissReason.CHECKSUM),
    ],
    ids=str,
)
def test_segments_that_do_not_agree(
    store: SnapshotStore, root: Path, change: dict[str, object], reason: MissReason
) -> None:
    SEGMENTED.build(store)
    rewrite(root, SEGMENTED, lambda body: body.update(change))
    expect_miss(store, SEGMENTED, reason, root)


@pytest.mark.parametrize("column", ["first_position", "segment", "n_tokens"])
@pytest.mark.parametrize("block", range(6))
def test_every_number_of_the_block_table_is_checked(store: SnapshotStore, root: Path, column: str, block: int) -> None:
    SEGMENTED.build(store)

    def change(body: dict[str, dict[str, list[int]]]) -> None:
        body["blocks"][column][block] += 1

    rewrite(root, SEGMENTED, change)
    expected = (
        MissReason.CHECKSUM if column == "n_tokens" or (column, block) == ("first_position", 0) else MissReason.VERSION
    )
    expect_miss(store, SEGMENTED, expected, root)


def test_the_table_of_millions_of_tokens_costs_little() -> None:
    layout = KVLayout(n_layers=1, n_kv_heads=1, head_dim=32, kv_type=KVType.K8V4)
    table = Segments(4096, 256).table(layout, 10_000_000)
    assert len(table.segment) == -(-10_000_000 // 256)
    assert max(table.first_position) == 256 + 4096 - 256
