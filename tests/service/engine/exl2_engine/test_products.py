"""Our product of few rows, in Triton's interpreter, against FP64 on weights dequantized by exllamav2's formulas."""

import numpy as np
import pytest
import torch

from tests.service.engine.exl2_engine.interpreted import use_interpreter
from tests.service.engine.exl2_engine.product_cases import exl2, gptq, inputs, packed, shuffled

use_interpreter()

from service.engine.exl2_engine.matrices import arrangement, matrix_of  # noqa: E402
from service.engine.exl2_engine.products import Product, ProductConfig, product_config  # noqa: E402

CASES = {
    "exl2": lambda n_in, n_out, seed=0: exl2(n_in, n_out, seed=seed),
    "exl2 of groups of 64, permuted": lambda n_in, n_out, seed=0: exl2(n_in, n_out, 64, True, seed),
    "exl2 of groups of 32": lambda n_in, n_out, seed=0: exl2(n_in, n_out, 32, seed=seed),
    "gptq": lambda n_in, n_out, seed=0: gptq(n_in, n_out, seed=seed),
    "gptq by activation, groups of 32": lambda n_in, n_out, seed=0: gptq(n_in, n_out, 32, True, seed),
    "gptq by activation, groups of 256": lambda n_in, n_out, seed=0: gptq(n_in, n_out, 256, True, seed),
}
CONFIG = ProductConfig(block_n=64, warps=4, stages=2, shares=3)


def matrix(case):
    found = matrix_of(case.tensors)
    assert found is not None
    return found


def close(found, expected):
    scale = np.abs(expected).max()
    assert np.isfinite(found.numpy()).all()
    assert np.abs(found.double().numpy() - expected).max() < 1e-3 * scale


def test_the_helper_s_words_are_those_of_the_comment_in_qdq_4():
    words = packed(np.arange(8)[:, None], 0)
    assert hex(int(words[0, 0])) == "0x76543210"
    assert hex(int(shuffled(words)[0, 0])) == "0x75316420"


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize(("rows", "n_in", "n_out"), [(1, 576, 96), (17, 256, 64)])
def test_a_product_is_that_of_the_dequantized_weights(kind, rows, n_in, n_out):
    case = CASES[kind](n_in, n_out)
    product, x = Product([matrix(case)], CONFIG), inputs(rows, n_in)
    (found,) = product.finish(product.shares(product.arrange(x)))
    close(found, x.double().numpy() @ case.weight)


def test_three_matrices_of_other_orders_are_one_launch():
    widths = (128, 64, 96)
    cases = [exl2(256, n, permuted=i > 0, seed=i) for i, n in enumerate(widths)]
    product, x = Product([matrix(c) for c in cases], CONFIG), inputs(3, 256)
    assert len(product.tables) == 3
    found = product.finish(product.shares(product.arrange(x)))
    for one, case in zip(found, cases, strict=True):
        assert one.is_contiguous()
        close(one, x.double().numpy() @ case.weight)


def test_rows_are_normalized_on_the_way():
    case, x = exl2(320, 64, 64, permuted=True), inputs(4, 320) * 3
    weight = torch.rand(320).half() + 0.5
    product = Product([matrix(case)], CONFIG)
    (found,) = product.finish(product.shares(product.arrange(x, weight, 1e-5)))
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(found, normed.numpy() @ case.weight)


def test_a_residual_is_added_in_place():
    case, x, residual = exl2(256, 160), inputs(2, 256), inputs(2, 160, seed=1) * 10
    expected = residual.double().numpy() + x.double().numpy() @ case.weight
    product = Product([matrix(case)], CONFIG)
    (found,) = product.finish(product.shares(product.arrange(x)), residual)
    assert found.data_ptr() == residual.data_ptr()
    close(residual, expected)


@pytest.mark.parametrize("biased", [False, True])
def test_a_whole_mlp(biased):
    cases = [exl2(256, 192, seed=0), exl2(256, 192, permuted=True, seed=1), exl2(192, 256, 64, permuted=True, seed=2)]
    biases = [torch.randn(c.weight.shape[1]).half() if biased else torch.zeros(c.weight.shape[1]) for c in cases]
    if biased:
        for case, bias in zip(cases, biases, strict=True):
            case.tensors["bias"] = bias
    first, second = Product([matrix(c) for c in cases[:2]], CONFIG), Product([matrix(cases[2])], CONFIG)
    x = inputs(3, 256)
    act = first.gate(first.shares(first.arrange(x)), second)
    residual = inputs(3, 256, seed=5)
    gate, up = (x.double().numpy() @ cases[i].weight + biases[i].double().numpy() for i in (0, 1))
    down = gate / (1 + np.exp(-gate)) * up @ cases[2].weight + biases[2].double().numpy()
    expected = residual.double().numpy() + down
    second.finish(second.shares(act), residual)
    close(residual, expected)


def test_biases_are_added():
    cases = [exl2(128, 64, seed=i) for i in range(2)]
    for i, case in enumerate(cases):
        case.tensors["bias"] = torch.arange(64).half() + 100 * i
    product, x = Product([matrix(c) for c in cases], CONFIG), inputs(2, 128)
    found = product.finish(product.shares(product.arrange(x)))
    for one, case in zip(found, cases, strict=True):
        close(one, x.double().numpy() @ case.weight + case.tensors["bias"].double().numpy())


def test_results_do_not_depend_on_the_other_rows():
    case, x = exl2(512, 64, permuted=True), inputs(7, 512)
    product = Product([matrix(case)], CONFIG)
    (together,) = product.finish(product.shares(product.arrange(x)))
    (alone,) = product.finish(product.shares(product.arrange(x[3:4])))
    assert torch.equal(together[3:4], alone)


def test_inputs_of_rows_that_are_not_side_by_side():
    case, wide = exl2(256, 64), inputs(3, 300)
    x = wide[:, :256]
    product = Product([matrix(case)], CONFIG)
    (found,) = product.finish(product.shares(product.arrange(x)))
    close(found, x.double().numpy() @ case.weight)


def test_an_order_beyond_the_numbers_of_16_signed_bits():
    order = torch.arange(40000, dtype=torch.int32).to(torch.int16)
    tensors = exl2(256, 64).tensors | {"q_perm": order[-256:]}
    assert matrix(type("Case", (), {"tensors": tensors})).order.tolist() == list(range(40000 - 256, 40000))


def test_places_beyond_the_inputs_are_empty():
    places = arrangement(torch.arange(136, dtype=torch.int32))
    assert places.shape == (256,)
    assert sorted(places[places >= 0].tolist()) == list(range(136))
    assert places[:3].tolist() == [0, 8, 16]
    assert places[16] == 1


def changed(case, **tensors):
    return case.tensors | tensors


@pytest.mark.parametrize(
    "tensors",
    [
        None,
        {},
        changed(exl2(256, 64), q_groups=torch.tensor([4, 0, 5, 16], dtype=torch.int16)),
        changed(exl2(256, 64), q_groups=torch.tensor([4, 0, 4, 8], dtype=torch.int16)),
        changed(gptq(256, 64, 64, act_order=True), g_idx=torch.arange(256, dtype=torch.int32) % 3),
    ],
    ids=["plain", "other", "mixed widths", "uneven groups", "uneven GPTQ groups"],
)
def test_what_it_does_not_read_is_left_to_exllamav2(tensors):
    assert matrix_of(tensors) is None


def test_matrices_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="equal inputs"):
        Product([matrix(exl2(256, 64)), matrix(exl2(512, 64))], CONFIG)


@pytest.mark.parametrize("n_in", [576, 5120, 21504])
@pytest.mark.parametrize("n_out", [192, 5120, 7168, 43008])
def test_every_share_of_a_product_has_inputs(n_in, n_out):
    config, blocks = product_config(n_in, n_out, 132), -(-n_in // 128)
    length = -(-blocks // config.shares)
    assert (config.shares - 1) * length < blocks
