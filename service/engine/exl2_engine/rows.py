"""From a batch of sequences to the tensors of one forward: rows of one document side by side, one copy to the card."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from service.engine.exl2_engine.pool import Document
from service.engine.exl2_engine.step import Step
from service.engine.exl2_engine.tails import Tails
from service.engine.protocol import Best, Rows

_ALIGN = 32
"""Sections begin at multiples of this many ints: kernels are compiled for a pointer's alignment."""


@dataclass(slots=True)
class RowPlan:
    """A forward on the host: lists of R rows, of G groups, and which parts of the wanted rows are whose.

    `order[i]`: which sequence of the batch is at place i. `n_wanted[i]`: its wanted rows.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    tail_at: list[int] = field(default_factory=list)
    tail_end: list[int] = field(default_factory=list)
    group_rows: list[int] = field(default_factory=lambda: [0])
    documents: list[Document | None] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    n_wanted: list[int] = field(default_factory=list)

    @property
    def n_rows(self) -> int:
        return len(self.ids)

    @property
    def max_tokens(self) -> int:
        return max((d.n_tokens + (d.slots.most if d.slots else 0) for d in self.documents if d), default=0)

    @property
    def has_slots(self) -> bool:
        return any(d.slots is not None and d.slots.first for d in self.documents if d)

    def by_sequence(self, found: Tensor | list[Best]) -> list[Any]:
        """What was found for the wanted rows, in the order of the batch."""
        ends = list(accumulate(self.n_wanted))
        parts = [found[end - n : end] for n, end in zip(self.n_wanted, ends, strict=True)]
        return [part for _, part in sorted(zip(self.order, parts, strict=True), key=lambda pair: pair[0])]


def plan_rows(batch: Sequence[Rows], tails: Tails) -> RowPlan:
    """Raises ValueError when a tail has no room for its rows, RuntimeError for a slot that is not in use."""
    plan = RowPlan(order=sorted(range(len(batch)), key=lambda i: id(batch[i].document)))
    for i in plan.order:
        rows = batch[i]
        if not plan.documents or plan.documents[-1] is not rows.document:
            plan.documents.append(rows.document)
            plan.group_rows.append(plan.n_rows)
        _add(plan, rows, tails)
        plan.group_rows[-1] = plan.n_rows
    return plan


def _add(plan: RowPlan, rows: Rows, tails: Tails) -> None:
    n, refeed = len(rows.tokens), int(rows.refeed)
    tails.check_room(rows.slot, n - refeed)
    length, first = tails.length(rows.slot), plan.n_rows
    document: Document | None = rows.document
    after, last = (document.next_position, document.last_position) if document else (0, -1)
    start = after + tails.own_length(rows.slot)
    plan.ids.extend(rows.tokens)
    plan.positions.extend([last] * refeed + list(range(start, start + n - refeed)))
    plan.slots.extend([rows.slot] * n)
    # The re-fed token's key is the document's: it has none in the tail, and comes before all that are there.
    plan.tail_at.extend([-1] * refeed + list(range(length, length + n - refeed)))
    plan.tail_end.extend([0] * refeed + list(range(length + 1, length + 1 + n - refeed)))
    plan.wanted.extend(range(first + rows.logits_from, first + n))
    plan.n_wanted.append(max(n - rows.logits_from, 0))


class StepShape(NamedTuple):
    """Sizes of a step's tensors, and its bounds (see `Step`). `n_blocks`: width of the block tables. `has_slots`:
    whether documents may have slots."""

    n_rows: int
    n_groups: int
    n_blocks: int
    max_group_rows: int
    max_tokens: int
    max_tail: int
    has_slots: bool = False

    @classmethod
    def of(cls, plan: RowPlan) -> "StepShape":
        """Just as large as a plan needs."""
        sizes = [b - a for a, b in zip(plan.group_rows, plan.group_rows[1:], strict=False)]
        n_blocks = max((len(d.block_ids) for d in plan.documents if d), default=1)
        bounds = max(sizes, default=0), plan.max_tokens, max(plan.tail_end)
        return cls(plan.n_rows, len(plan.documents), n_blocks, *bounds, plan.has_slots)

    def sections(self) -> list[tuple[int, int]]:
        """First int and length of each section of the packed step: six of numbers a row, then those of groups."""
        groups = [self.n_groups + 1, self.n_groups, self.n_groups, self.n_groups * self.n_blocks]
        lengths = [self.n_rows] * 6 + groups
        at, found = 0, []
        for length in lengths:
            found.append((at, length))
            at += -(-length // _ALIGN) * _ALIGN
        return found

    @property
    def n_ints(self) -> int:
        first, length = self.sections()[-1]
        return first + length


class PackedStep(NamedTuple):
    """A step on the device. `wanted` ``[R]``: rows whose logits are wanted, as many of them as the plan says."""

    ids: Tensor
    wanted: Tensor
    step: Step


def pack(plan: RowPlan, shape: StepShape, *, pinned: bool) -> Tensor:
    """All of a step as one int32 tensor on the host; what `shape` has more than `plan` is padding."""
    host = torch.zeros(shape.n_ints, dtype=torch.int32, pin_memory=pinned)
    array = host.numpy()
    row_lists = (plan.ids, plan.positions, plan.slots, plan.tail_at, plan.tail_end, plan.wanted)
    *rows, groups, tokens, slot_first, tables = [array[first : first + length] for first, length in shape.sections()]
    for section, values in zip(rows, row_lists, strict=True):
        section[: len(values)] = values
    rows[3][plan.n_rows :] = -1
    groups[: len(plan.group_rows)] = plan.group_rows
    groups[len(plan.group_rows) :] = plan.n_rows
    tables = tables.reshape(shape.n_groups, shape.n_blocks)
    for i, document in enumerate(plan.documents):
        if document is not None:
            tokens[i] = document.n_tokens
            slot_first[i] = document.slots.first if document.slots else 0
            tables[i, : len(document.block_ids)] = document.block_ids
    return host


def unpack(packed: Tensor, shape: StepShape) -> PackedStep:
    """Views of a packed step that is on the device."""
    views = [packed[first : first + length] for first, length in shape.sections()]
    ids, positions, slots, tail_at, tail_end, wanted, group_rows, group_tokens, slot_first, tables = views
    step = Step(
        positions=positions,
        slots=slots,
        tail_at=tail_at,
        tail_end=tail_end,
        group_rows=group_rows,
        group_tokens=group_tokens,
        block_tables=tables.view(shape.n_groups, shape.n_blocks),
        max_group_rows=shape.max_group_rows,
        max_tokens=shape.max_tokens,
        max_tail=shape.max_tail,
        slot_first=slot_first if shape.has_slots else None,
    )
    return PackedStep(ids, wanted, step)
