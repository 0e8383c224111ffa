"""A draft model in the memory plan of the one it guesses for: its own lines, and as many blocks of documents."""

import pytest

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.footprint import Footprint
from service.engine.exl2_engine.ledger import LIBRARIES, Sizes, block_table_nbytes, ledger_of, shortage
from service.engine.exl2_engine.scratch import Shape
from service.engine.ledger import GIB, CardMemory, Ledger, MemoryPlanRefused
from service.engine.torch_engine import ledger as host

MIB = 1 << 20
BIG, SMALL = Shape(5120, 21504, 64, 40, 8, 128, 152064), Shape(2048, 8192, 16, 16, 4, 128, 152064)
SIZES = Sizes(max_context=131072, n_slots=9, tail_tokens=2048)


def layout(shape: Shape) -> KVLayout:
    return KVLayout(shape.n_layers, shape.n_kv_heads, shape.head_dim, KVType.K8V4)


def on_card(memory: CardMemory, pool_nbytes: int | None = None) -> tuple[Ledger, Ledger]:
    """The plan of both, and the draft model's own."""
    sizes = Sizes(131072, 5, 2048, reserve_nbytes=0, pool_nbytes=0)
    small = Footprint((900 * MIB,), (300 * MIB,), (), 0, 0)
    own = ledger_of(SMALL, small, layout(SMALL), sizes, CardMemory(0, 0))
    beside = own.beside((LIBRARIES,), block_table_nbytes(layout(SMALL)))
    big = Footprint((14 * GIB,), (GIB,), (GIB,), 5120 * 21504, 0)
    wanted = Sizes(131072, 9, 2048, pool_nbytes=pool_nbytes)
    return ledger_of(BIG, big, layout(BIG), wanted, memory, beside), own


def nbytes(ledger: Ledger, name: str) -> int:
    return sum(line.nbytes for line in ledger.lines if line.name == name)


def test_a_draft_models_documents_get_as_many_blocks_and_all_of_it_fits() -> None:
    both, own = on_card(CardMemory(free=47 * GIB, total=48 * GIB))
    assert nbytes(both, "draft model: weights") == own.nbytes("load")
    assert nbytes(both, "draft model: tails") == own.nbytes("tails") == 5 * 2048 * 16 * 4 * 128 * 2 * 2
    assert nbytes(both, "draft model: its steps") == own.nbytes("work") - nbytes(own, LIBRARIES)
    block = layout(SMALL).record_nbytes(256) * 16
    assert both.pool_blocks * block <= nbytes(both, "draft model: documents") <= both.pool_blocks * block * 1.01
    planned = sum(line.nbytes for line in both.lines)
    assert both.memory.total - 2 * (both.block_nbytes + block) - 64 * MIB < planned <= both.memory.total
    assert both.has_draft
    assert not own.has_draft
    capped, _ = on_card(CardMemory(free=47 * GIB, total=48 * GIB), pool_nbytes=10 * both.block_nbytes)
    assert capped.pool_blocks == 10
    assert 10 * block <= nbytes(capped, "draft model: documents") <= 10 * block + 20 * MIB


def test_a_refusal_says_that_the_draft_model_may_be_left_out() -> None:
    both, _ = on_card(CardMemory(free=19 * GIB, total=20 * GIB))
    assert "leave out the draft model (PREREAD_DRAFT_MODEL)" in shortage(both, layout(BIG), 131072)
    alone = ledger_of(BIG, Footprint((14 * GIB,), (GIB,), (), 0, 0), layout(BIG), SIZES, both.memory)
    assert "draft" not in shortage(alone, layout(BIG), 131072)


def test_on_a_processor_it_shares_the_interpreter_only() -> None:
    sizes = host.HostSizes(5, 2048, 0)
    memory = CardMemory(free=20 * GIB, total=24 * GIB)
    own = host.host_ledger(host.HostWeights(100_000_000, 60_000_000, 4, 4), SMALL, layout(SMALL), sizes, memory)
    wanted = host.HostSizes(9, 2048, 2 * GIB)
    weights = host.HostWeights(1_000_000_000, 0, 2, 2)
    alone = host.host_ledger(weights, BIG, layout(BIG), wanted, memory)
    both = host.host_ledger(weights, BIG, layout(BIG), wanted, memory, own.beside((host.LIBRARIES,)))
    assert both.pool_blocks == alone.pool_blocks > 0
    more = {line.name: line.nbytes for line in both.lines if line.name.startswith("draft model")}
    assert more.pop("draft model: documents") == both.pool_blocks * own.block_nbytes
    assert sum(more.values()) == own.nbytes("load", "file", "tails", "work") - nbytes(own, host.LIBRARIES)
    tight = CardMemory(free=GIB, total=24 * GIB)
    refused = host.host_ledger(weights, BIG, layout(BIG), wanted, tight, own.beside((host.LIBRARIES,)))
    with pytest.raises(MemoryPlanRefused, match="no draft model"):
        host.check_fits(refused)
