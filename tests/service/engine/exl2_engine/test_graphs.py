"""Captured decode steps, with the work repeated in place of a CUDA graph: padding and choice of a graph."""

import pytest
import torch

from cache_store.layout import KVType
from service.engine.exl2_engine.graphs import DecodeGraphs, Repeat
from service.engine.protocol import Rows


@pytest.fixture
def runners(make_runner):
    """A runner without and one with repeated steps for up to 6 rows."""

    def make(kv_type=KVType.K8V4, capture=Repeat, max_tokens=4096):
        plain, graphed = make_runner(kv_type), make_runner(kv_type)
        graphed.graphs = DecodeGraphs(
            graphed.step_logits, capture, torch.device("cpu"), max_rows=6, max_tokens=max_tokens, max_tail=256
        )
        with torch.inference_mode():
            graphed.graphs.capture_all()
        return plain, graphed

    return make


def decode(runner, texts, ids, read_document, n_steps=4):
    """Logits of steps of one row each for sequences on documents (None: on none), after a short prompt."""
    documents = {i: read_document(runner, ids(n, seed=n))[0] if n else None for i, n in enumerate(dict.fromkeys(texts))}
    order = list(dict.fromkeys(texts))
    slots = [runner.new_tail() for _ in texts]
    found = []
    for slot, text in zip(slots, texts, strict=True):
        prompt = ids(3 + slot, seed=slot)
        runner.forward([Rows(slot, documents[order.index(text)], prompt, logits_from=len(prompt) - 1)])
    for step in range(n_steps):
        tokens = ids(len(texts), seed=50 + step)
        batch = [
            Rows(slot, documents[order.index(text)], [token])
            for slot, text, token in zip(slots, texts, tokens, strict=True)
        ]
        found.append(torch.cat(runner.forward(batch)))
    return torch.stack(found)


@pytest.mark.parametrize("kv_type", [KVType.FP16, KVType.K8V4])
@pytest.mark.parametrize("texts", [[0], [300], [300, 300, 300], [300, 0, 513, 300, 0]])
def test_a_padded_step_gives_what_the_step_alone_gives(runners, ids, read_document, kv_type, texts):
    plain, graphed = runners(kv_type)
    expected = decode(plain, texts, ids, read_document)
    got = decode(graphed, texts, ids, read_document)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)
    assert graphed.graphs.n_replayed == 4


def test_there_is_one_graph_for_each_number_of_rows_and_bound_on_documents(runners):
    _, graphed = runners(max_tokens=40_000)
    assert graphed.graphs.rows == [1, 2, 4, 6]
    assert graphed.graphs.n_graphs == 4 * (3 + 1)


def test_other_steps_are_declined(runners, ids, read_document):
    _, graphed = runners()
    slots = [graphed.new_tail() for _ in range(2)]
    graphed.forward([Rows(slots[0], None, ids(7))])
    graphed.forward([Rows(slots[0], None, ids(1)), Rows(slots[1], None, ids(2), logits_from=1)])
    graphed.forward([Rows(slots[0], None, ids(1), logits_from=1), Rows(slots[1], None, ids(1))])
    assert (graphed.graphs.n_replayed, graphed.graphs.n_declined) == (0, 3)


def test_a_refed_token_alone_goes_through_a_graph(runners, ids, read_document):
    found = []
    for runner in runners():
        tokens = ids(300)
        document, _ = read_document(runner, tokens)
        slot = runner.new_tail()
        found.append(runner.forward([Rows(slot, document, tokens[-1:], refeed=True)])[0])
        assert runner.tail_length(slot) == 0
    torch.testing.assert_close(*found, rtol=0, atol=2e-4)


def test_rows_at_positions_of_their_own_go_through_a_graph(runners, ids, read_document):
    found = []
    for runner in runners():
        document, blocks = read_document(runner, ids(600))
        runner.finish_load(document, 512, next_position=2000, last_position=1500)
        slot = runner.new_tail()
        runner.import_tail(slot, blocks[2:], 88, fetched=True)
        found.append(torch.cat([runner.forward([Rows(slot, document, [token])])[0] for token in (4, 5, 6)]))
    torch.testing.assert_close(*found, rtol=0, atol=2e-4)


def test_a_document_longer_than_the_graphs_are_for_runs_without_one(runners, ids, read_document):
    plain, graphed = runners(max_tokens=512)
    expected = decode(plain, [700, 300], ids, read_document)
    got = decode(graphed, [700, 300], ids, read_document)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)
    assert graphed.graphs.n_replayed == 0


def test_what_cannot_be_captured_runs_as_it_is_and_says_why(runners, ids, read_document, caplog):
    tried = []

    def refuse(work):
        tried.append(work)
        raise RuntimeError("operation not permitted when stream is capturing")

    plain, graphed = runners(capture=refuse)
    assert len(tried) == 1
    assert "not permitted" in graphed.graphs.failure
    assert "without a CUDA graph" in caplog.text
    expected = decode(plain, [300, 300], ids, read_document)
    torch.testing.assert_close(decode(graphed, [300, 300], ids, read_document), expected, rtol=0, atol=0)
    assert graphed.graphs.n_graphs == 0
