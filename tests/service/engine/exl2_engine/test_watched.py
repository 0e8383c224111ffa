"""Where the card's engine says that answers look: as the torch engine does, over the same stored bytes."""

import numpy as np
import pytest
import torch

from cache_store.layout import KVType
from service.engine.exl2_engine.graphs import DecodeGraphs, Repeat
from service.engine.protocol import Rows
from service.engine.torch_engine.runner import TorchRunner
from tests.service.engine.runner_parts import load_layerwise, resident_with_slots

N, SINKS, WINDOW = 700, 256, 90
HEADS = ((2, 1), (0, 0))
ENDS = [*range(SINKS), *range(N - WINDOW, N)]
PLACES = [[np.arange(SINKS + i + head, N - WINDOW, 2 + head) for head in range(2)] for i in range(3)]


@pytest.fixture(scope="module", params=[KVType.FP16, KVType.K8V4, KVType.K4V4])
def both(request, make_runner, tiny_dir):
    """The card's runner and the torch engine's."""
    options = {"kv_type": request.param, "n_slots": 6, "tail_tokens": 256, "chunk_tokens": 512}
    theirs = TorchRunner.load(tiny_dir, compute_dtype="float32", **options)
    theirs.watched_heads = HEADS
    return make_runner(request.param, watched_heads=HEADS), theirs


@pytest.fixture
def blocks(both, ids, read_document):
    document, blocks = read_document(both[0], ids(N))
    both[0].free_document(document)
    return blocks


def looks(runner, documents, ids, fetched):
    """Of two sequences on two documents: a prompt in one step, five tokens step by step."""
    slots = [runner.new_tail() for _ in documents]
    for slot in slots:
        runner.import_tail(slot, fetched, 188, fetched=True)
        runner.watch_tail(slot)
    both = list(zip(slots, documents, strict=True))
    runner.forward([Rows(slot, document, ids(9 + i, seed=i)) for i, (slot, document) in enumerate(both)])
    for step in range(5):
        runner.forward([Rows(slot, document, ids(1, seed=10 * i + step)) for i, (slot, document) in enumerate(both)])
    found = [runner.tail_looks(slot, document, [2, 4]) for slot, document in both]
    for slot in slots:
        runner.free_tail(slot)
    return found


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.document, other.document, rtol=0, atol=1e-3)
        torch.testing.assert_close(one.tail, other.tail, rtol=0, atol=1e-3)
        for slots in zip(one.slots, other.slots, strict=True):
            torch.testing.assert_close(*slots, rtol=0, atol=1e-3)


def test_both_engines_say_the_same(both, blocks, ids):
    found = []
    for runner in both:
        documents = [load_layerwise(runner, blocks, N), resident_with_slots(runner, blocks, N, ENDS, PLACES)]
        runner.finish_load(documents[0], N)
        found.append(looks(runner, documents, ids, blocks[2:]))
        for document in documents:
            runner.free_document(document)
    close(*found)
    assert [len(places) for places in (PLACES[2][1], PLACES[0][0])] == [x.shape[1] for x in found[0][1].slots]
    total = found[0][1].document.sum(1) + found[0][1].tail.sum(1) + sum(x.sum(1) for x in found[0][1].slots)
    torch.testing.assert_close(total, torch.tensor([2.0, 4.0]), rtol=1e-4, atol=0)


def test_steps_that_go_through_graphs_are_watched_too(both, blocks, ids):
    runner, found = both[0], []
    documents = [load_layerwise(runner, blocks, N), resident_with_slots(runner, blocks, N, ENDS, PLACES)]
    runner.finish_load(documents[0], N)
    graphs = DecodeGraphs(runner.step_logits, Repeat, torch.device("cpu"), max_rows=4, max_tokens=4096, max_tail=256)
    with torch.inference_mode():
        graphs.capture_all()
    for used in (None, graphs):
        runner.graphs = used
        found.append(looks(runner, documents, ids, blocks[2:]))
    runner.graphs = None
    assert graphs.n_replayed == 5
    close(*found)
    for document in documents:
        runner.free_document(document)


def test_heads_that_the_model_has_not(make_runner):
    with pytest.raises(ValueError, match="no KV heads"):
        make_runner(KVType.FP16, watched_heads=((3, 0),))
