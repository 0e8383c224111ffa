"""Slots: rows of each head's own beside those of the document, against the whole document and stock transformers."""

import numpy as np
import pytest
import torch

from cache_store.codec import encode_records
from cache_store.layout import KVType
from cache_store.rows import take_head_rows, take_rows
from service.engine.protocol import Rows
from tests.service.engine.runner_parts import ask, load_layerwise
from tests.service.engine.torch_engine.test_windowed import Stock, assert_same

N, SINKS, WINDOW = 700, 16, 90
MIDDLE = range(SINKS, N - WINDOW)
LAYERS = HEADS = 3


@pytest.fixture
def texts(token_ids):
    """A document, a short question for plain products, a long one for the flash kernel."""
    return token_ids(N), token_ids(4, seed=1), token_ids(40, seed=2)


def slotted(runner, document, places):
    """A resident document of sinks and window, and the slots ``places[layer][head]``, out of a whole one."""
    layout, rotated = runner.layout, runner.layout.kv_type is not KVType.FP16
    dense, slots = [], []
    rows = np.array([*range(SINKS), *range(N - WINDOW, N)])
    for k, v, of_layer in zip(document.k, document.v, places, strict=True):
        records = encode_records(k[:, :N], v[:, :N], layout, rotated=rotated)
        dense.append(take_rows(records, N, layout, rows))
        own = [take_head_rows(records, N, layout, head, np.array(p, np.int64)) for head, p in enumerate(of_layer)]
        slots.append(memoryview(bytearray().join(record for records in own for record in records)))
    resident = load_layerwise(runner, list(zip(*dense, strict=True)), len(rows))
    runner.new_slots(resident, [[len(p) for p in of_layer] for of_layer in places])
    for layer, records in enumerate(slots):
        runner.load_slots(resident, layer, records)
    runner.finish_load(resident, len(rows), next_position=N, last_position=N - 1)
    return resident


def some_places(seed=0, n_all=None):
    """Another number of slots in every head of every layer; none in one of them, every row in another."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 300, (LAYERS, HEADS))
    counts[0, 1], counts[1, 2] = 0, len(MIDDLE)
    return [[sorted(rng.choice(MIDDLE, n, replace=False)) for n in of_layer] for of_layer in counts]


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize(("question", "atol"), [(1, 1e-5), (2, 3e-5)], ids=["few rows", "many rows"])
def test_every_row_as_a_slot_is_the_whole_document(load_runner, prefill, texts, kv_type, question, atol):
    runner, tokens = load_runner(kv_type), texts[0]
    document, _ = prefill(runner, tokens)
    resident = slotted(runner, document, [[MIDDLE] * HEADS] * LAYERS)
    whole, ours = (ask(runner, d, tokens, texts[question]) for d in (document, resident))
    torch.testing.assert_close(ours, whole, rtol=0, atol=atol)


@pytest.mark.parametrize("question", [1, 2], ids=["few rows", "many rows"])
def test_each_head_sees_its_own_slots(load_runner, eager, prefill, texts, question):
    runner, tokens = load_runner(), texts[0]
    document, _ = prefill(runner, tokens)
    places = [some_places()[1]] * LAYERS
    resident = slotted(runner, document, places)
    logits = ask(runner, resident, tokens, texts[question])
    n, hidden = len(texts[question]), torch.ones(9, len(texts[question]), N + len(texts[question]), dtype=torch.bool)
    hidden[:, :, N:] = torch.ones(n, n, dtype=torch.bool).triu(1)
    hidden[:, :, [*range(SINKS), *range(N - WINDOW, N)]] = False
    for head, own in enumerate(places[0]):
        hidden[3 * head : 3 * head + 3, :, own] = False
    stock = Stock(eager).prefill(tokens)
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(torch.float32).min)
    with torch.no_grad():
        reference = stock.model(torch.tensor([texts[question]]), mask[None], torch.arange(N, N + n)[None], stock.cache)
    assert_same(reference, logits[1:])


@pytest.mark.parametrize("kv_type", [KVType.FP16, KVType.K8V4])
def test_rows_at_once_are_computed_as_each_alone(load_runner, prefill, texts, token_ids, kv_type):
    runner, tokens = load_runner(kv_type), texts[0]
    document, _ = prefill(runner, tokens)
    one, other = (slotted(runner, document, some_places(seed)) for seed in (1, 2))
    questions = [token_ids(n, seed=n) for n in (1, 2, 3, 12)]
    alone = [ask(runner, d, tokens, q) for d in (one, other, document) for q in questions]
    slots = [runner.new_tail() for _ in range(4)]
    batches = [[Rows(s, d, [tokens[-1], *q], refeed=True) for s, q in zip(slots, questions, strict=True)]
               for d in (one, other, document)]  # fmt: skip
    together = []
    for batch in batches:
        together += runner.forward(batch)
        for slot in slots:
            runner.truncate_tail(slot, 0)
    mixed = runner.forward([batch[i] for i, batch in enumerate(batches)])
    for slot in slots:
        runner.free_tail(slot)
    for a, b in zip([*together, *mixed], [*alone, alone[0], alone[5], alone[10]], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def test_row_after_row_is_all_at_once(load_runner, prefill, texts):
    runner, (tokens, _, question) = load_runner(KVType.K8V8), texts
    document, _ = prefill(runner, tokens)
    resident = slotted(runner, document, some_places(3))
    at_once, slot = ask(runner, resident, tokens, question), runner.new_tail()
    singly = [runner.forward([Rows(slot, resident, [tokens[-1], question[0]], refeed=True)])[0]]
    singly += [runner.forward([Rows(slot, resident, [token])])[0] for token in question[1:]]
    runner.free_tail(slot)
    torch.testing.assert_close(torch.cat(singly), at_once, rtol=0, atol=2e-5)


def test_queries_are_those_of_rows_that_see_the_slots(load_runner, prefill, texts):
    runner, (tokens, short, long) = load_runner(), texts
    document, _ = prefill(runner, tokens)
    resident = slotted(runner, document, [[MIDDLE] * HEADS] * LAYERS)
    bare = slotted(runner, document, [[[]] * HEADS] * LAYERS)
    slot = runner.new_tail()
    for question in (short, long):
        whole, ours, without = (
            runner.question_queries(Rows(slot, d, question), [(2, 1), (1, 0)]) for d in (document, resident, bare)
        )
        torch.testing.assert_close(ours, whole, rtol=0, atol=1e-5)
        assert not torch.isclose(without, whole, atol=1e-3).all()
    runner.free_tail(slot)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_what_is_counted_is_what_is_held(load_runner, prefill, texts, compute_dtype):
    runner = load_runner(KVType.K8V8, compute_dtype)
    document, _ = prefill(runner, texts[0])
    places = some_places(4)
    resident = slotted(runner, document, places)
    n_slots = sum(len(own) for of_layer in places for own in of_layer)
    assert resident.nbytes == runner.document_nbytes(SINKS + WINDOW, n_slots)
    held = [*resident.slots.keys, *resident.slots.values]
    assert sum(x.nbytes for of_layer in held for x in of_layer) == 2 * n_slots * 64 * 4
    assert runner.document_nbytes(N) == document.nbytes
    assert torch.isfinite(ask(runner, resident, texts[0], texts[1])).all()
    runner.free_document(resident)
    assert resident.nbytes == 0


def test_a_stale_step_leaves_nothing_in_the_columns_of_a_shorter_head(load_runner, prefill, texts):
    runner, (tokens, question, _) = load_runner(), texts
    document, _ = prefill(runner, tokens)
    few, many = slotted(runner, document, some_places(5)), slotted(runner, document, [[MIDDLE] * HEADS] * LAYERS)
    before = ask(runner, few, tokens, question)
    ask(runner, many, tokens, question)
    assert torch.equal(ask(runner, few, tokens, question), before)


def test_slots_that_are_not_the_models_are_refused(load_runner, prefill, texts):
    runner = load_runner()
    document, _ = prefill(runner, texts[0])
    for counts in ([[1] * HEADS], [[1] * 2] * LAYERS, [[1, 1, -1]] * LAYERS):
        with pytest.raises(ValueError, match="slots"):
            runner.new_slots(document, counts)
    with pytest.raises(ValueError, match="no slots"):
        runner.load_slots(document, 0, memoryview(b""))
    runner.new_slots(document, [[1] * HEADS] * LAYERS)
    with pytest.raises(ValueError, match="bytes of records"):
        runner.load_slots(document, 0, memoryview(bytes(10)))
