"""On the card: exllamav2's modules, called as the engine calls them, against the plain decoder on the same weights, and
the engine over them. `PREREAD_TEST_MODEL` may name any imported model; without it the demo model must be there."""

import pytest
import torch

from cache_store.layout import KVType
from service.engine.exl2_engine.graphs import CudaCapture, DecodeGraphs
from service.engine.exl2_engine.loading import Options, capture_steps, dq_elements, make_runner
from service.engine.models.card import load_card
from service.engine.models.gate import gate_text, kl_stats
from service.engine.protocol import Rows
from service.engine.tokenizer import Tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.model]

ROWS = (1, 2, 5, 33, 600)
"""One row, few, more than a kernel takes at once, and the way of many rows."""


@pytest.fixture(scope="module")
def card(demo_model):
    return load_card(demo_model)


@pytest.fixture(scope="module")
def model(demo_model, card):
    from service.engine.exl2_engine.exllama import ExllamaModel

    return ExllamaModel.load(demo_model, max_rows=512, max_dq_elements=dq_elements(demo_model, card))


@pytest.fixture(scope="module")
def plain(model):
    from benchmarks.gpu_smoke import dequantized

    return dequantized(model)


@pytest.fixture(scope="module")
def text(demo_model, card):
    tokenizer = Tokenizer.load(demo_model)
    return tokenizer.encode_plain(gate_text())[: min(2600, card.max_context)]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def runner_of(model, card, kv_type, **changes):
    options = {"n_slots": 8, "tail_tokens": 1024, "max_rows": 4, "chunk_tokens": 1024, "graphs": False} | changes
    return make_runner(model, card, Options(kv_type=kv_type, **options), 64)


def read_document(runner, ids):
    document, chunk = runner.new_document(len(ids)), runner.limits.chunk_tokens
    for first in range(0, len(ids), chunk):
        runner.prefill_chunk(document, ids[first : first + chunk])
    return document


def close(found, expected, share=0.02):
    """Within a share of the largest value: FP16 sums in another order, no row or column out of place."""
    limit = share * expected.float().abs().max().item()
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=limit)


@pytest.mark.parametrize("n_rows", ROWS)
def test_every_module_of_a_layer_gives_what_plain_torch_gives(model, plain, text, n_rows):
    ids = torch.tensor(text[:n_rows], dtype=torch.int32, device="cuda")
    x = plain.embed(ids)
    close(model.embed(ids), x, 1e-3)
    for layer in (0, 1, model.n_layers - 1):
        half = x.half()
        for found, expected in zip(model.qkv(layer, half), plain.qkv(layer, x), strict=True):
            assert found.shape == expected.shape
            close(found, expected)
        _, _, v = plain.qkv(layer, x)
        attention = v.repeat_interleave(model.n_heads // model.n_kv_heads, 1)
        after = plain.attention_out(layer, attention, x)
        close(model.attention_out(layer, attention.half(), half.clone()), after)
        x = plain.mlp(layer, after)
        close(model.mlp(layer, after.half()), x)
    close(model.head(x.half()), plain.head(x))


@pytest.mark.parametrize("backend", ["triton", "portable"])
@pytest.mark.parametrize(
    ("kv_type", "limit"), [(KVType.FP16, 2e-3), (KVType.K8V8, 2.5e-3), (KVType.K8V4, 1e-2)], ids=str
)
def test_its_predictions_are_those_of_exact_attention_in_fp32(model, plain, card, text, kv_type, limit, backend):
    from benchmarks.gpu_smoke import exact_logits

    n = 300
    reference = exact_logits(plain, text, n)
    runner = runner_of(model, card, kv_type, backend=backend)
    document, slot = read_document(runner, text[:-n]), runner.new_tail()
    found = [
        runner.forward([Rows(slot, document, text[i : i + 92])])[0] for i in range(len(text) - n, len(text) - 24, 92)
    ]
    found += [runner.forward([Rows(slot, document, [token])])[0] for token in text[-24:]]
    assert kl_stats(reference, torch.cat(found)).mean < limit


def one_step(slots, document, i, vocab):
    """A row for each slot, every other one on the document."""
    return [Rows(s, document if n % 2 else None, [(31 * n + 17 * i) % vocab]) for n, s in enumerate(slots)]


def steps_of(runner, document, n_rows, vocab):
    slots = [runner.new_tail() for _ in range(n_rows)]
    found = []
    for i in range(6):
        found.append(torch.cat(runner.forward(one_step(slots, document, i, vocab))))
    for slot in slots:
        runner.free_tail(slot)
    return torch.cat(found)


@pytest.mark.parametrize("n_rows", [1, 2, 3, 4])
def test_replayed_steps_give_what_eager_ones_give(model, card, text, n_rows):
    runner = runner_of(model, card, KVType.K8V4)
    document = read_document(runner, text[:1500])
    eager = steps_of(runner, document, n_rows, card.vocab_size)
    capture_steps(runner, model, Options(kv_type=KVType.K8V4, max_rows=4, tail_tokens=1024))
    assert runner.graphs.failure is None
    replayed = steps_of(runner, document, n_rows, card.vocab_size)
    assert runner.graphs.n_replayed == 6
    assert kl_stats(eager, replayed).mean < 1e-4


def test_one_graph_serves_documents_of_any_length(model, card, text):
    runner = runner_of(model, card, KVType.K8V4)
    documents = [read_document(runner, text[:n]) for n in (1, 256, 700, 1300)]
    eager = [steps_of(runner, document, 4, card.vocab_size) for document in documents]
    runner.graphs = DecodeGraphs(
        runner.step_logits, CudaCapture(model.device), model.device, max_rows=4, max_tokens=4096, max_tail=1024
    )
    model.settle(runner.graphs.rows)
    runner.graphs.capture_all()
    for document, expected in zip(documents, eager, strict=True):
        assert kl_stats(expected, steps_of(runner, document, 4, card.vocab_size)).mean < 1e-4
    assert runner.graphs.n_declined == 0


def test_steps_between_the_layers_of_a_chunk_disturb_neither(model, card, text):
    runner = runner_of(model, card, KVType.K8V4, graphs=True)
    document = read_document(runner, text[:800])
    alone = runner.new_document(1024)
    expected_blocks = runner.prefill_chunk(alone, text[1000:2024])
    expected = steps_of(runner, document, 2, card.vocab_size)
    found = []
    slots = [runner.new_tail() for _ in range(2)]

    def step():
        if len(found) < 6:
            batch = one_step(slots, document, len(found), card.vocab_size)
            found.append(torch.cat(runner.forward(batch)))

    blocks = runner.prefill_chunk(runner.new_document(1024), text[1000:2024], step)
    assert kl_stats(expected, torch.cat(found)).mean < 1e-4
    same = sum(
        bytes(a) == bytes(b) for x, y in zip(blocks, expected_blocks, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert same == len(blocks) * model.n_layers


def test_what_leaves_the_card_is_what_comes_back(model, card, text):
    runner = runner_of(model, card, KVType.K8V4)
    ids = text[:1500]
    document, blocks = runner.new_document(len(ids)), []
    for first in range(0, len(ids), 1024):
        blocks += runner.prefill_chunk(document, ids[first : first + 1024])
    restored = runner.new_document(len(ids))
    for layer in range(model.n_layers):
        records = memoryview(bytearray().join(block[layer] for block in blocks))
        runner.load_blocks(restored, layer, 0, records, len(ids))
    runner.finish_load(restored, len(ids))
    torch.cuda.synchronize()
    for pool in runner.pool.layers:
        assert torch.equal(pool[document.blocks.long()], pool[restored.blocks.long()])


def test_a_turn_goes_out_and_in(model, card, text):
    runner = runner_of(model, card, KVType.K8V4)
    document = read_document(runner, text[:700])
    going, resumed = runner.new_tail(), runner.new_tail()
    runner.forward([Rows(going, document, text[700:1000], logits_from=300)])
    runner.import_tail(resumed, runner.export_tail(going, 0, 300), 300)
    more = text[1000:1005]
    found = [runner.forward([Rows(slot, document, more)])[0] for slot in (going, resumed)]
    assert kl_stats(*found).mean < 1e-5
