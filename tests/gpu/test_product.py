"""On the card: our product of few rows against the weights that exllamav2 dequantizes, on an EXL2 model of random
weights and on GPTQ copies of the demo model; and whole steps with it, captured."""

import pytest
import torch

from cache_store.layout import KVType
from service.engine.exl2_engine.graphs import CudaCapture
from service.engine.exl2_engine.loading import Options, capture_steps, dq_elements, make_runner
from service.engine.models.card import load_card
from service.engine.protocol import Rows

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 7, 16, 17, 32)
BEYOND = 33


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def load(directory):
    from service.engine.exl2_engine.exllama import ExllamaModel

    elements = dq_elements(directory, load_card(directory))
    return ExllamaModel.load(directory, max_rows=512, max_dq_elements=elements, product="triton")


@pytest.fixture(scope="module")
def exl2_dir(tmp_path_factory):
    from benchmarks.gpu_model import Recipe, make

    directory = tmp_path_factory.mktemp("models") / "random"
    make(Recipe(layers=2, hidden=512, intermediate=1408, heads=8, kv_heads=2, head_dim=64, vocab=512), directory)
    return directory


@pytest.fixture(scope="module")
def exl2(exl2_dir):
    return load(exl2_dir)


@pytest.fixture(scope="module", params=[(128, False), (128, True)], ids=str)
def gptq(request, demo_model, tmp_path_factory):
    from benchmarks.gpu_gptq import make

    group_size, act_order = request.param
    return load(make(demo_model, tmp_path_factory.mktemp("gptq"), group_size, act_order)[0])


def inputs(n_rows, width, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(n_rows, width, generator=generator, device="cuda").half()


def near(found, expected, limit=1e-3):
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert float(error.nan_to_num(torch.inf)) < limit


def check_products(model, n_rows):
    """Every product of the first layer."""
    layer, attention, mlp = model._few[0], model.attentions[0], model.mlps[0]
    groups = [(layer.qkv, (attention.q_proj, attention.k_proj, attention.v_proj)), (layer.out, (attention.o_proj,))]
    groups += [(layer.gate_up, (mlp.gate_proj, mlp.up_proj)), (layer.down, (mlp.down_proj,))]
    for product, linears in groups:
        assert product is not None
        x = inputs(n_rows, linears[0].in_features)
        poison()
        found = product.finish(product.shares(product.arrange(x)))
        for y, linear in zip(found, linears, strict=True):
            near(y, x.double() @ linear.get_weight_tensor_dq().double())


def poison():
    """Fill memory that the next calls will be given with NaN."""
    torch.full((1 << 24,), torch.nan, device="cuda")


@pytest.mark.parametrize("n_rows", ROWS)
def test_a_product_is_that_of_exllamav2_s_weights(exl2, n_rows):
    check_products(exl2, n_rows)


@pytest.mark.model
@pytest.mark.parametrize("n_rows", ROWS)
def test_a_gptq_product_is_that_of_exllamav2_s_weights(gptq, n_rows):
    check_products(gptq, n_rows)


def check_modules(model, n_rows):
    """What a layer's parts give is what exllamav2's give, within the rounding of FP16 sums."""
    other, x = model.for_documents, inputs(n_rows, model.hidden_size)
    for found, expected in zip(model.qkv(0, x), other.qkv(0, x), strict=True):
        assert found.is_contiguous()
        near(found, expected.double(), 2e-2)
    attention = inputs(n_rows, model.n_heads * model.head_dim, 1).view(n_rows, model.n_heads, model.head_dim)
    found, expected = (m.attention_out(0, attention, x.clone()) for m in (model, other))
    near(found, expected.double(), 2e-2)
    near(model.mlp(0, x.clone()), other.mlp(0, x.clone()).double(), 2e-2)


@pytest.mark.parametrize("n_rows", [*ROWS, BEYOND])
def test_parts_of_a_layer_give_what_exllamav2_s_give(exl2, n_rows):
    check_modules(exl2, n_rows)


@pytest.mark.model
@pytest.mark.parametrize("n_rows", [1, 17])
def test_parts_of_a_gptq_layer_give_what_exllamav2_s_give(gptq, n_rows):
    check_modules(gptq, n_rows)


def test_a_row_is_the_same_alone_among_others_and_again(exl2):
    x = inputs(16, exl2.hidden_size)
    together = exl2.mlp(0, x.clone())
    for _ in range(20):
        assert torch.equal(together, exl2.mlp(0, x.clone()))
    assert torch.equal(together[5:6], exl2.mlp(0, x[5:6].clone()))


def test_a_layer_goes_into_a_graph(exl2):
    x = inputs(4, exl2.hidden_size)
    expected = exl2.mlp(1, exl2.attention_out(1, exl2.qkv(1, x)[0].clone(), x.clone()))
    step = CudaCapture(exl2.device)(lambda: exl2.mlp(1, exl2.attention_out(1, exl2.qkv(1, x)[0].clone(), x.clone())))
    for _ in range(3):
        assert torch.equal(step(), expected)


class Planted(Exception):
    pass


class Unusable:
    def __getitem__(self, layer):
        raise Planted


def test_documents_are_never_computed_with_it(exl2, exl2_dir, monkeypatch):
    """Not even a last chunk of few rows: what is stored must not depend on the setting."""
    card = load_card(exl2_dir)
    options = Options(kv_type=KVType.K8V4, n_slots=4, tail_tokens=256, max_rows=4, chunk_tokens=256, graphs=False)
    runner = make_runner(exl2, card, options, 16)
    monkeypatch.setattr(exl2, "_few", Unusable())
    document = runner.new_document(256 + 20)
    for n in (256, 20):
        runner.prefill_chunk(document, [7 * i % 256 for i in range(n)])
    with pytest.raises(Planted):
        runner.forward([Rows(runner.new_tail(), document, [1])])


def test_replayed_steps_are_those_of_the_product(exl2, exl2_dir):
    card = load_card(exl2_dir)
    options = Options(kv_type=KVType.K8V4, n_slots=4, tail_tokens=256, max_rows=4, chunk_tokens=256, graphs=False)
    runner = make_runner(exl2, card, options, 16)
    capture_steps(runner, exl2, options)
    assert runner.graphs.failure is None

    def answer(graphs):
        kept, runner.graphs = runner.graphs, runner.graphs if graphs else None
        slots = [runner.new_tail() for _ in range(3)]
        found = [
            torch.cat(runner.forward([Rows(s, None, [7 * place + 3 * i]) for place, s in enumerate(slots)]))
            for i in range(4)
        ]
        for slot in slots:
            runner.free_tail(slot)
        runner.graphs = kept
        return torch.cat(found)

    # The head is exllamav2's, which adds up in FP16 in any order: no two steps give the very same logits.
    near(answer(True), answer(False).double(), 2e-2)
