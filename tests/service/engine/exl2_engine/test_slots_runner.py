"""Documents with slots on the card's runner: against the whole document, and the torch engine over the same bytes."""

import numpy as np
import pytest
import torch

from cache_store.layout import KVType
from service.engine.exl2_engine.graphs import DecodeGraphs, Repeat
from service.engine.protocol import Rows
from service.engine.torch_engine.runner import TorchRunner
from tests.service.engine.runner_parts import ask, load_layerwise, resident_with_slots

N, SINKS, WINDOW = 1100, 256, 90
MIDDLE = np.arange(SINKS, N - WINDOW)
ENDS = [*range(SINKS), *range(N - WINDOW, N)]
LAYERS, HEADS = 3, 2
ALL = [[MIDDLE] * HEADS] * LAYERS


def some_places(seed=0):
    """Another number of slots in every head of every layer; none in one of them, every row in another."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 600, (LAYERS, HEADS))
    counts[0, 1], counts[1, 0] = 0, len(MIDDLE)
    return [[np.sort(rng.choice(MIDDLE, n, replace=False)) for n in of_layer] for of_layer in counts]


@pytest.fixture(scope="module", params=[KVType.FP16, KVType.K8V4])
def both(request, make_runner, tiny_dir):
    options = {"kv_type": request.param, "n_slots": 6, "tail_tokens": 256, "chunk_tokens": 512}
    return make_runner(request.param, n_blocks=30), TorchRunner.load(tiny_dir, compute_dtype="float32", **options)


@pytest.fixture
def blocks(both, ids, read_document):
    document, blocks = read_document(both[0], ids(N))
    both[0].free_document(document)
    return blocks


@pytest.fixture
def resident(both, blocks):
    """The same document in both runners."""
    documents = [resident_with_slots(runner, blocks, N, ENDS, some_places()) for runner in both]
    yield documents
    for runner, document in zip(both, documents, strict=True):
        runner.free_document(document)


def furthest(ours, theirs):
    p, q = (x.double().log_softmax(-1) for x in (theirs, ours))
    return float((p.exp() * (p - q)).sum(-1).max())


def test_every_row_as_a_slot_is_the_whole_document(both, blocks, ids):
    runner, tokens, question = both[0], ids(N), ids(20, seed=1)
    whole, slotted = load_layerwise(runner, blocks, N), resident_with_slots(runner, blocks, N, ENDS, ALL)
    expected, got = (ask(runner, document, tokens, question) for document in (whole, slotted))
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    n_slots = LAYERS * HEADS * len(MIDDLE)
    assert slotted.nbytes == runner.document_nbytes(len(ENDS), n_slots) == (2 + 4) * runner.pool.block_nbytes
    for document in (whole, slotted):
        runner.free_document(document)
    assert runner.pool.n_free == 30


@pytest.mark.parametrize("n_question", [1, 40])
def test_both_engines_answer_alike(both, resident, ids, n_question):
    tokens, question = ids(N), ids(n_question, seed=2)
    ours, theirs = (ask(r, d, tokens, question) for r, d in zip(both, resident, strict=True))
    assert furthest(ours, theirs) < 1e-4


def test_a_question_has_the_same_queries(both, resident, ids):
    found = []
    for runner, document in zip(both, resident, strict=True):
        slot = runner.new_tail()
        found.append(runner.question_queries(Rows(slot, document, ids(10, seed=4)), [(2, 1), (1, 0)]))
        runner.free_tail(slot)
    torch.testing.assert_close(*found, rtol=0, atol=1e-3)


def test_several_users_share_it_beside_other_documents(both, resident, blocks, ids):
    runner = both[0]
    other = resident_with_slots(runner, blocks, N, ENDS, some_places(1))
    whole = load_layerwise(runner, blocks, N)
    documents = [resident[0], other, resident[0], whole, None]
    questions = [ids(n, seed=n) for n in (1, 3, 9, 2, 4)]
    alone, slots = [], [runner.new_tail() for _ in documents]
    for document, question, slot in zip(documents, questions, slots, strict=True):
        alone.append(runner.forward([Rows(slot, document, question)])[0])
        runner.truncate_tail(slot, 0)
    batch = [Rows(*each) for each in zip(slots, documents, questions, strict=True)]
    for got, expected in zip(runner.forward(batch), alone, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    for slot in slots:
        runner.free_tail(slot)
    for document in (other, whole):
        runner.free_document(document)


def test_steps_go_through_graphs_of_their_own(both, resident, blocks, ids):
    runner, found = both[0], []
    whole = load_layerwise(runner, blocks, N)
    graphs = DecodeGraphs(runner.step_logits, Repeat, torch.device("cpu"), max_rows=4, max_tokens=4096, max_tail=256)
    with torch.inference_mode():
        graphs.capture_all()
    for used in (None, graphs):
        runner.graphs = used
        slots = [runner.new_tail() for _ in range(3)]
        for token in (5, 6):
            batch = [Rows(s, d, [token]) for s, d in zip(slots, (resident[0], whole, resident[0]), strict=True)]
            found.append(torch.cat([*runner.forward(batch), *runner.forward([Rows(slots[1], whole, [9])])]))
        for slot in slots:
            runner.free_tail(slot)
    runner.graphs = None
    runner.free_document(whole)
    assert (graphs.n_replayed, graphs.n_declined) == (4, 0)
    torch.testing.assert_close(torch.stack(found[:2]), torch.stack(found[2:]), rtol=0, atol=2e-4)


def test_slots_that_are_not_the_models_are_refused(both, blocks):
    runner = both[0]
    document = load_layerwise(runner, blocks, N)
    for counts in ([[1] * HEADS], [[1] * 3] * LAYERS, [[1, -1]] * LAYERS):
        with pytest.raises(ValueError, match="slots"):
            runner.new_slots(document, counts)
    with pytest.raises(ValueError, match="no slots"):
        runner.load_slots(document, 0, memoryview(b""))
    runner.new_slots(document, [[1] * HEADS] * LAYERS)
    with pytest.raises(ValueError, match="bytes of records"):
        runner.load_slots(document, 0, memoryview(bytes(10)))
    runner.free_document(document)
