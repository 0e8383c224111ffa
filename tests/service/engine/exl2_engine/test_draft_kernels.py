"""Several rows of a sequence in one step, by both backends, the Triton kernels in Triton's interpreter: each row sees
those before it and none behind, and nothing is left of rows that are taken back."""

import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.portable import PortableBackend
from tests.service.engine.exl2_engine.draft_cases import STEPS, OneLayer, answer, begin, one_by_one

TOLERANCE = 4e-3


def backend_of(name, layout):
    if name == "portable":
        return PortableBackend(layout, "cpu")
    from service.engine.exl2_engine.triton_backend import TritonBackend

    return TritonBackend(layout)


def outputs(layer, ids, steps, wrong=9):
    """Behind prompts that plain torch computes: in the interpreter they would take longer than all else."""
    texts, documents = [ids(90, seed=i) for i in range(3)], [layer.document, layer.document, None]
    backend, layer.backend = layer.backend, PortableBackend(layer.layout, "cpu")
    slots = begin(layer, documents, texts)
    layer.backend = backend
    return slots, answer(layer, documents, texts, steps, slots, ids(8, seed=wrong))


@pytest.mark.parametrize(
    ("name", "kv_type", "padded"),
    [
        *[("portable", kv_type, False) for kv_type in KVType],
        *[("triton", kv_type, False) for kv_type in KVType],
        ("portable", KVType.K8V4, True),
        ("triton", KVType.K8V4, True),
    ],
)
def test_rows_of_one_step_give_what_they_give_one_by_one(ids, name, kv_type, padded):
    layout = KVLayout(1, 1, 64, kv_type)
    drafted = OneLayer(backend_of(name, layout), padded=padded)
    single = OneLayer(PortableBackend(layout, "cpu"))
    slots, found = outputs(drafted, ids, STEPS)
    same_slots, expected = outputs(single, ids, one_by_one(STEPS))
    assert slots == same_slots
    for got, one in zip(found, expected, strict=True):
        gap = (got.float() - one.float()).norm(dim=-1) / one.float().norm(dim=-1)
        assert gap.max() < TOLERANCE
    for slot in slots:
        n = single.tail_length(slot)
        assert drafted.tail_length(slot) == n
        parts = zip(drafted.tails.tokens(0, slot, 0, n), single.tails.tokens(0, slot, 0, n), strict=True)
        for one, other in parts:
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["portable", "triton"])
def test_a_row_does_not_see_those_behind_it(ids, name):
    """What follows a row in its step may be anything: other drafts behind it change nothing in it."""
    backend = backend_of(name, KVLayout(1, 1, 64, KVType.K8V4))
    (_, found), (_, others) = (outputs(OneLayer(backend), ids, STEPS[:1], wrong) for wrong in (9, 10))
    for one, other in zip(found, others, strict=True):
        assert torch.equal(one, other)
