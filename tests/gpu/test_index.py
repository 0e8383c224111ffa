"""The index of a document on a card: the figures it has on the processor, in bounded memory."""

import pytest
import torch

from benchmarks.gpu_documents import random_records
from cache_store.layout import KVLayout, KVType
from service.engine.fetch.index import KeyIndex
from service.engine.fetch.sizes import SCORING_NBYTES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
HEADS = [(1, 0), (0, 1)]


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize(("n_tokens", "rows"), [(1000, 3), (20_000, 30), (131_072, 600)])
def test_a_card_scores_as_the_processor_does(kv_type, n_tokens, rows):
    layout = KVLayout(2, 2, 128, kv_type)
    records = memoryview(random_records(layout, n_tokens))
    indexes = [KeyIndex(layout, n_tokens, HEADS) for _ in range(2)]
    for index in indexes:
        for layer in index.layers:
            index.add(layer, 0, records, n_tokens)
    indexes[1].move_to(torch.device("cuda"))
    queries = torch.randn(len(HEADS), 5, rows, 128, device="cuda") * 0.2
    few, resident = queries[:, :, :20], [(0, 256), (n_tokens - 300, n_tokens)]
    torch.testing.assert_close(indexes[1].scores(few, resident), indexes[0].scores(few, resident), rtol=1e-3, atol=1e-8)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert torch.isfinite(indexes[1].scores(queries, resident)).all()
    assert torch.cuda.max_memory_allocated() - before < SCORING_NBYTES
