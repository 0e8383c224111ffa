"""The plan of memory: what is counted, and what is refused before anything is loaded."""

import pytest

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.scratch import Shape
from service.engine.ledger import GIB, CardMemory, Ledger, MemoryPlanRefused
from service.engine.llama_engine.ledger import check_fits, llama_ledger

LAYOUT = KVLayout(30, 3, 64, KVType.K8V8)
SHAPE = Shape(576, 1536, 30, 9, 3, 64, 49152)


def plan(memory: CardMemory, n_documents: int = 10_000, max_context: int = 8192) -> Ledger:
    return llama_ledger(145 << 20, SHAPE, LAYOUT, (n_documents, 3_000), (512, 128, 40), memory, max_context)


def test_documents_and_tails_take_what_their_tokens_take():
    ledger = plan(CardMemory(7 * GIB, 8 * GIB))
    assert ledger.nbytes("pool") == 10_000 * LAYOUT.bytes_per_token
    assert ledger.nbytes("tails") == 3_000 * LAYOUT.bytes_per_token
    assert ledger.nbytes("before") == GIB
    assert ledger.pool_tokens == 10_000 // 256 * 256
    assert "documents" in ledger.table()
    check_fits(ledger)


def test_documents_count_as_much_as_the_model_since_all_is_taken_at_once():
    nearly = plan(CardMemory(GIB, GIB))
    check_fits(nearly)
    with pytest.raises(MemoryPlanRefused, match="PREREAD_RESIDENT_BYTES"):
        check_fits(plan(CardMemory(GIB, GIB), n_documents=40_000))
    check_fits(plan(CardMemory(GIB, GIB), n_documents=40_000), swap_nbytes=GIB)


def test_a_document_on_its_way_from_disk_and_what_rows_see_of_the_cache_are_counted():
    memory = CardMemory(7 * GIB, 8 * GIB)
    short, long, longer = (plan(memory, max_context=n).nbytes("work") for n in (1000, 10_000, 1 << 20))
    assert long - short == 9000 * LAYOUT.bytes_per_token
    assert longer == long  # no document is larger than the memory for them
    more = plan(memory, n_documents=20_000, max_context=1000).nbytes("work")
    assert more - short == 10_000 * 512 * 2
