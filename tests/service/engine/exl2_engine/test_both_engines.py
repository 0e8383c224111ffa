"""Windowed documents on the card's runner and on the torch engine's: the same from the same stored bytes."""

import pytest
import torch

from cache_store.layout import KVType
from service.engine.protocol import Rows
from service.engine.torch_engine.runner import TorchRunner
from tests.service.engine.runner_parts import load_layerwise

CHUNK = 512
HEADS = [(2, 1), (0, 0), (1, 1)]


@pytest.fixture(scope="module", params=[KVType.FP16, KVType.K8V4])
def both(request, make_runner, tiny_dir):
    """The card's runner and the torch engine's."""
    options = {"kv_type": request.param, "n_slots": 6, "tail_tokens": 256, "chunk_tokens": CHUNK}
    return make_runner(request.param), TorchRunner.load(tiny_dir, compute_dtype="float32", **options)


@pytest.fixture
def loaded(both, ids, read_document):
    """The rows of a document of 700 tokens in both, at the positions of a longer one; its tokens, its blocks."""
    tokens = ids(700)
    document, blocks = read_document(both[0], tokens)
    both[0].free_document(document)
    documents = [load_layerwise(runner, blocks, 700) for runner in both]
    for runner, document in zip(both, documents, strict=True):
        runner.finish_load(document, 700, next_position=1500, last_position=1200)
    yield documents, tokens, blocks
    for runner, document in zip(both, documents, strict=True):
        runner.free_document(document)


@pytest.mark.parametrize(("sinks", "first", "last"), [(256, 300, 700), (0, 0, 700), (16, 16, 200)])
def test_a_replay_gives_the_same_scores(both, loaded, ids, sinks, first, last):
    documents, tokens, _ = loaded
    repeated = [*ids(12, seed=3), *tokens[first:last]]
    ours, theirs = (
        runner.replay(document, repeated, sinks, first, last) for runner, document in zip(both, documents, strict=True)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-6)
    order = theirs.flatten(0, 1).argsort(-1, descending=True)[:, :20]
    assert (ours.flatten(0, 1).gather(1, order).diff() < 1e-5).all()


def test_a_question_has_the_same_queries(both, loaded, ids):
    documents, tokens, _ = loaded
    for refeed in (False, True):
        found = []
        for runner, document in zip(both, documents, strict=True):
            slot = runner.new_tail()
            rows = [tokens[-1], *ids(9, seed=4)] if refeed else ids(10, seed=4)
            found.append(runner.question_queries(Rows(slot, document, rows, refeed=refeed), HEADS))
            runner.free_tail(slot)
        torch.testing.assert_close(*found, rtol=0, atol=1e-3)


def test_fetched_rows_give_the_same_answers(both, loaded, ids):
    documents, tokens, blocks = loaded
    found = []
    for runner, document in zip(both, documents, strict=True):
        slot = runner.new_tail()
        runner.forward([Rows(slot, document, ids(20, seed=1))])
        turn = runner.export_tail(slot, 0, 20)
        runner.import_tail(slot, blocks[2:], 188, fetched=True)
        rows = [tokens[-1], *ids(8, seed=2)]
        found.append([runner.forward([Rows(slot, document, rows, refeed=True)])[0]])
        runner.drop_fetched(slot)
        assert runner.tail_length(slot) == 28
        found[-1].append(runner.forward([Rows(slot, document, ids(3, seed=5))])[0])
        assert [len(record) for record in turn[0]] == [runner.layout.record_nbytes(20)] * 3
        runner.free_tail(slot)
    for ours, theirs in zip(*found, strict=True):
        p, q = (x.double().log_softmax(-1) for x in (theirs, ours))
        assert float((p.exp() * (p - q)).sum(-1).max()) < 1e-4


def test_segments_behind_the_same_sinks_are_the_same(both, ids):
    segments = [ids(600, seed=20), ids(600, seed=21)]
    found = []
    for runner in both:
        document = runner.new_document(256 + 600)
        for tokens in segments:
            if document.n_tokens:
                runner.keep_prefix(document, 256)
            for at in range(0, 600, CHUNK):
                runner.prefill_chunk(document, tokens[at : at + CHUNK])
        slot = runner.new_tail()
        assert (document.n_tokens, document.next_position) == (856, 856)
        found.append(runner.forward([Rows(slot, document, [segments[1][-1], *ids(6, seed=3)], refeed=True)])[0])
        runner.free_tail(slot)
        runner.free_document(document)
    p, q = (x.double().log_softmax(-1) for x in found)
    assert float((p.exp() * (p - q)).sum(-1).max()) < 1e-4
