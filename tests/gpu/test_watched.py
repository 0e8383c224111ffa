"""On the card: where answers look is the same from captured steps as from eager ones and in plain torch, at next to no
cost. `PREREAD_TEST_MODEL` may name any imported model; without it the demo model must be there."""

import time

import pytest
import torch

from cache_store.layout import KVType
from service.engine.exl2_engine.loading import Options, dq_elements, make_runner
from service.engine.models.card import load_card
from service.engine.models.gate import gate_text
from service.engine.protocol import Rows
from service.engine.tokenizer import Tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.model]

N_STEPS = 64
MOST = 0.05
"""Of decoding, what watching may cost."""


@pytest.fixture(scope="module")
def card(demo_model):
    return load_card(demo_model)


@pytest.fixture(scope="module")
def model(demo_model, card):
    from service.engine.exl2_engine.exllama import ExllamaModel

    return ExllamaModel.load(demo_model, max_rows=512, max_dq_elements=dq_elements(demo_model, card))


@pytest.fixture(scope="module")
def text(demo_model, card):
    return Tokenizer.load(demo_model).encode_plain(gate_text())[: min(2600, card.max_context)]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def runner_of(model, card, kv_type=KVType.K8V4, **changes):
    heads = ((model.n_layers // 2, 0), (model.n_layers - 2, model.n_kv_heads - 1))
    options = {"n_slots": 8, "tail_tokens": 1024, "max_rows": 4, "chunk_tokens": 1024, "watched_heads": heads} | changes
    return make_runner(model, card, Options(kv_type=kv_type, **options), 64)


def looks(runner, text, n_rows=3):
    """Of several sequences on one document, six tokens each: what is seen of the document and of the tail."""
    document = runner.new_document(1500)
    for first in range(0, 1500, 1024):
        runner.prefill_chunk(document, text[first : min(first + 1024, 1500)])
    slots = [runner.new_tail() for _ in range(n_rows)]
    for i, slot in enumerate(slots):
        runner.watch_tail(slot)
        runner.forward([Rows(slot, document, text[1500 + 10 * i : 1510 + 10 * i])])
    for step in range(5):
        runner.forward([Rows(s, document, [text[1600 + 50 * i + step]]) for i, s in enumerate(slots)])
    found = [runner.tail_looks(slot, document, [2, 4]) for slot in slots]
    for slot in slots:
        runner.free_tail(slot)
    runner.free_document(document)
    return torch.stack([torch.cat((each.document, each.tail), 1) for each in found])


@pytest.mark.parametrize("kv_type", [KVType.FP16, KVType.K8V4])
def test_captured_eager_and_portable_steps_say_the_same(model, card, text, kv_type):
    graphed = runner_of(model, card, kv_type, graphs=True)
    assert graphed.graphs.failure is None
    found = looks(graphed, text)
    assert graphed.graphs.n_replayed == 5
    eager = looks(runner_of(model, card, kv_type, graphs=False), text)
    portable = looks(runner_of(model, card, kv_type, graphs=False, backend="portable"), text)
    for other in (eager, portable):
        torch.testing.assert_close(found, other, rtol=0, atol=0.02)
    torch.testing.assert_close(found.sum(-1), torch.tensor([[2.0, 4.0]] * 3), rtol=1e-3, atol=0)


def decoding_s(runner, document, text, watched):
    """Seconds of an answer's steps, and of finding where it looked."""
    slot = runner.new_tail()
    if watched:
        runner.watch_tail(slot)
    runner.forward([Rows(slot, document, text[1500:1520])])
    torch.cuda.synchronize()
    started = time.perf_counter()
    for step in range(N_STEPS):
        runner.forward([Rows(slot, document, [text[1600 + step]])])
    if watched:
        runner.tail_looks(slot, document, [N_STEPS // 2, N_STEPS // 2 + 1])
    torch.cuda.synchronize()
    spent = time.perf_counter() - started
    runner.free_tail(slot)
    return spent


def test_it_costs_little_of_decoding(model, card, text):
    """In turns, the least of each: without, the captured steps have no copies of queries at all."""
    heads = runner_of(model, card, graphs=False).watched_heads
    runners = [runner_of(model, card, graphs=True, watched_heads=watched) for watched in ((), heads)]
    documents = []
    for runner in runners:
        document = runner.new_document(1024)
        runner.prefill_chunk(document, text[:1024])
        documents.append(document)
    spent = [[], []]
    for _ in range(7):
        for i, (runner, document) in enumerate(zip(runners, documents, strict=True)):
            spent[i].append(decoding_s(runner, document, text, watched=i == 1))
    without, watching = (min(times[1:]) for times in spent)
    assert watching < without * (1 + MOST)
