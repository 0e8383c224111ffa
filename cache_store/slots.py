"""Summary slots on disk: rows that every head of every layer has for itself, each head another number of them.

Their snapshot is one of a single layer and a single head, in blocks of 32 rows: the rows of all heads one after
another, by layer and head, those of each head from the beginning of a block on. Its last block is filled up with its
last row. How many rows count is told by the manifest.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from cache_store.layout import KVLayout

SLOT_BLOCK_TOKENS = 32
_Rows = Annotated[int, Meta(ge=0, le=1 << 31)]
_Heads = Annotated[list[_Rows], Meta(min_length=1, max_length=4096)]

Counts = Sequence[Sequence[int]]
"""Slots of each head, ``[n_layers][n_kv_heads]``."""


class SlotCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`counts`: slots of each head, by layer and head, without those that fill a block up."""

    counts: Annotated[list[_Heads], Meta(min_length=1, max_length=4096)]


def slot_layout(layout: KVLayout) -> KVLayout:
    """The layout of the slots of a model whose KV is of `layout`."""
    return KVLayout(1, 1, layout.head_dim, layout.kv_type, SLOT_BLOCK_TOKENS)


def stored_rows(n_slots: int) -> int:
    """Rows that a head's slots take on disk: whole blocks."""
    return -(-n_slots // SLOT_BLOCK_TOKENS) * SLOT_BLOCK_TOKENS


def layer_rows(counts: Counts) -> list[int]:
    """Rows that the slots of each layer take on disk."""
    return [sum(stored_rows(n) for n in of_layer) for of_layer in counts]


def check_slots(counts: Counts, layout: KVLayout, n_rows: int) -> None:
    """Raises ValueError unless a snapshot of `n_rows` rows in `layout` can be that of these slots."""
    if layout != slot_layout(layout):
        raise ValueError(f"slots lie in one layer of one head, in blocks of {SLOT_BLOCK_TOKENS}")
    if len({len(of_layer) for of_layer in counts}) != 1 or min(n for heads in counts for n in heads) < 0:
        raise ValueError("slots are counted for every layer and head")
    if sum(layer_rows(counts)) != n_rows:
        raise ValueError(f"the slots take {sum(layer_rows(counts))} rows, not {n_rows}")
