"""On the card: several rows of a sequence in one step, from captured graphs, give what one row at a time gives, and
what the torch engine gives. `PREREAD_TEST_MODEL` may name any imported model; without it the demo model must be there.
"""

import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.loading import Options, dq_elements, make_runner
from service.engine.models.card import load_card
from service.engine.models.gate import gate_text, kl_stats
from service.engine.tokenizer import Tokenizer
from tests.service.engine.exl2_engine.draft_cases import STEPS, OneLayer, answer, begin, one_by_one
from tests.service.engine.runner_parts import load_layerwise

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TOLERANCE = 4e-3
DOCUMENT = 1300


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize(("kv_heads", "head_dim", "group_heads"), [(8, 128, 5), (3, 64, 3), (2, 256, 2)])
def test_the_kernels_give_each_row_what_it_gets_alone(kv_type, padded, kv_heads, head_dim, group_heads):
    from service.engine.exl2_engine.triton_backend import TritonBackend

    backend, found = TritonBackend(KVLayout(1, kv_heads, head_dim, kv_type)), []
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(3, 500, (90,), generator=generator).tolist() for _ in range(3)]
    for steps, shape in ((STEPS, padded), (one_by_one(STEPS), False)):
        layer = OneLayer(backend, group_heads=group_heads, n_document=700, padded=shape, device="cuda")
        documents = [layer.document, layer.document, None]
        slots = begin(layer, documents, texts)
        found.append(answer(layer, documents, texts, steps, slots, list(range(8))))
    for got, one in zip(*found, strict=True):
        gap = (got.float() - one.float()).norm(dim=-1) / one.float().norm(dim=-1)
        assert float(gap.max()) < TOLERANCE


@pytest.fixture(scope="module")
def card(demo_model):
    return load_card(demo_model)


@pytest.fixture(scope="module")
def model(demo_model, card):
    from service.engine.exl2_engine.exllama import ExllamaModel

    with torch.inference_mode():
        return ExllamaModel.load(demo_model, max_rows=512, max_dq_elements=dq_elements(demo_model, card))


@pytest.fixture(scope="module")
def text(demo_model):
    return Tokenizer.load(demo_model).encode_plain(gate_text())[: DOCUMENT + 300]


def runner_of(model, card, kv_type, **changes):
    heads = ((model.n_layers // 2, 0), (model.n_layers - 2, model.n_kv_heads - 1))
    options = {"n_slots": 8, "tail_tokens": 256, "max_rows": 2, "chunk_tokens": 1024, "draft_tokens": 7}
    options |= {"watched_heads": heads} | changes
    return make_runner(model, card, Options(kv_type=kv_type, **options), 32)


def read_document(runner, text):
    document, blocks = runner.new_document(DOCUMENT), []
    for first in range(0, DOCUMENT, runner.limits.chunk_tokens):
        blocks += runner.prefill_chunk(document, text[first : min(first + runner.limits.chunk_tokens, DOCUMENT)])
    return document, blocks


def answered(runner, document, text, steps):
    """Logits of two sequences on the document and one on none, and where the first two looked."""
    documents = [document, document, None]
    texts = [text[DOCUMENT + 70 * i : DOCUMENT + 70 * i + 90] for i in range(3)]
    slots = begin(runner, documents, texts)
    for slot in slots if runner.watched_heads else ():
        runner.watch_tail(slot)
    found = answer(runner, documents, texts, steps, slots, [11, 12, 13, 14, 15, 16, 17, 18])
    looks = [runner.tail_looks(slot, document, [2, 4]) for slot in slots[:2]] if runner.watched_heads else []
    for slot in slots:
        runner.free_tail(slot)
    return torch.cat(found), looks


@pytest.mark.model
@pytest.mark.parametrize("kv_type", list(KVType))
def test_captured_steps_with_drafts_give_what_single_rows_give(model, card, text, kv_type):
    runner = runner_of(model, card, kv_type)
    assert runner.graphs.failure is None
    assert runner.limits.draft_tokens == min(7, model.cheap_rows - 1)
    document, _ = read_document(runner, text)
    expected, single_looks = answered(runner, document, text, one_by_one(STEPS))
    replayed, declined = runner.graphs.n_replayed, runner.graphs.n_declined
    found, looks = answered(runner, document, text, STEPS)
    assert runner.graphs.n_replayed - replayed == len(STEPS)
    assert runner.graphs.n_declined - declined == 1  # the prompts
    assert kl_stats(expected, found).mean < 1e-4
    for one, other in zip(single_looks, looks, strict=True):
        torch.testing.assert_close(one.document, other.document, rtol=0, atol=0.02)
        torch.testing.assert_close(one.tail, other.tail, rtol=0, atol=0.02)


@pytest.mark.model
@pytest.mark.parametrize(("kv_type", "limit"), [(KVType.FP16, 2e-3), (KVType.K8V8, 2.5e-3), (KVType.K8V4, 1e-2)])
def test_the_torch_engine_gives_the_same_over_the_same_snapshot(model, card, text, demo_model, kv_type, limit):
    from service.engine.torch_engine.runner import TorchRunner

    runner = runner_of(model, card, kv_type, watched_heads=())
    document, blocks = read_document(runner, text)
    found, _ = answered(runner, document, text, STEPS)
    theirs = TorchRunner.load(demo_model, kv_type=kv_type, compute_dtype="float32", n_slots=4, tail_tokens=256)
    expected, _ = answered(theirs, load_layerwise(theirs, blocks, DOCUMENT), text, STEPS)
    assert kl_stats(expected, found).mean < limit
