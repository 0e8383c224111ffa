import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.pool import BlockPool
from service.engine.exl2_engine.rows import StepShape, pack, plan_rows, unpack
from service.engine.exl2_engine.tails import Tails
from service.engine.protocol import Best, Rows

LAYOUT = KVLayout(1, 1, 32, KVType.K8V4)
CPU = torch.device("cpu")


@pytest.fixture
def tails():
    return Tails(LAYOUT, 4, 64, torch.float32, CPU)


@pytest.fixture
def documents():
    pool = BlockPool(LAYOUT, 8, CPU)
    made = [pool.take(n) for n in (300, 700)]
    for document in made:
        document.n_tokens = document.capacity
    return made


def step_of(plan, shape=None):
    shape = shape or StepShape.of(plan)
    return unpack(pack(plan, shape, pinned=False), shape)


def test_rows_of_one_document_stand_side_by_side_and_come_back_in_order(tails, documents):
    slots = [tails.take() for _ in range(4)]
    tails.extend(slots[1], 10)
    first, second = documents
    batch = [
        Rows(slots[0], first, [5, 6, 7], refeed=True),
        Rows(slots[1], second, [8]),
        Rows(slots[2], first, [9], logits_from=1),
        Rows(slots[3], None, [10, 11], logits_from=1),
    ]
    plan = plan_rows(batch, tails)
    packed = step_of(plan)
    step = packed.step
    assert (step.n_rows, step.n_groups, step.max_group_rows, step.max_tokens, step.max_tail) == (7, 3, 4, 700, 11)
    by_token = {int(t): i for i, t in enumerate(packed.ids)}
    rows = [by_token[t] for t in (5, 6, 7, 8, 9, 10, 11)]
    assert step.positions[rows].tolist() == [299, 300, 301, 710, 300, 0, 1]
    assert step.tail_at[rows].tolist() == [-1, 0, 1, 10, 0, 0, 1]
    assert step.tail_end[rows].tolist() == [0, 1, 2, 11, 1, 1, 2]
    assert [step.slots[i].item() for i in rows] == [slots[i] for i in (0, 0, 0, 1, 2, 3, 3)]
    for g, document in enumerate(plan.documents):
        first_row, last_row = step.group_rows[g : g + 2].tolist()
        expected = {first: {5, 6, 7, 9}, second: {8}, None: {10, 11}}[document]
        assert set(packed.ids[first_row:last_row].tolist()) == expected
        assert step.group_tokens[g] == (document.n_tokens if document else 0)
        ids = document.block_ids if document else []
        assert step.block_tables[g, : len(ids)].tolist() == ids
    assert {int(packed.ids[i]) for i in packed.wanted[: len(plan.wanted)]} == {5, 6, 7, 8, 11}
    logits = packed.ids[packed.wanted[: len(plan.wanted)].long()][:, None]
    assert [part[:, 0].tolist() for part in plan.by_sequence(logits)] == [[5, 6, 7], [8], [], [11]]
    best = [Best(int(row), True) for row in logits]
    assert [[row.token_id for row in part] for part in plan.by_sequence(best)] == [[5, 6, 7], [8], [], [11]]


def test_positions_are_those_of_the_document_and_fetched_rows_take_none(tails, documents):
    document, slots = documents[0], [tails.take() for _ in range(2)]
    document.positions = 50, 9
    tails.extend(slots[0], 3)
    tails.extend(slots[0], 7)
    tails.mark_fetched(slots[0], 7)
    batch = [Rows(slots[0], document, [5, 6]), Rows(slots[1], document, [7, 8, 9], refeed=True)]
    step = step_of(plan_rows(batch, tails)).step
    assert step.positions.tolist() == [53, 54, 9, 50, 51]
    assert step.tail_at.tolist() == [10, 11, -1, 0, 1]
    assert step.tail_end.tolist() == [11, 12, 0, 1, 2]
    assert step.group_tokens.tolist() == [300]


def test_padding_rows_write_nothing_and_belong_to_no_group(tails, documents):
    slot = tails.take()
    plan = plan_rows([Rows(slot, documents[1], [3])], tails)
    step = step_of(plan, StepShape(4, 4, 6, 4, 1536, 64)).step
    assert step.tail_at.tolist() == [0, -1, -1, -1]
    assert step.tail_end.tolist() == [1, 0, 0, 0]
    assert step.group_rows.tolist() == [0, 1, 1, 1, 1]
    assert step.group_tokens.tolist() == [700, 0, 0, 0]
    assert step.block_tables[0].tolist() == [*documents[1].block_ids, 0, 0, 0]


def test_every_part_of_a_packed_step_is_aligned(tails, documents):
    plan = plan_rows([Rows(tails.take(), documents[0], [1, 2, 3])], tails)
    assert all(first % 32 == 0 for first, _ in StepShape.of(plan).sections())
