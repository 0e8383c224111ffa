import pytest
import torch
from torch import nn

from service.engine.torch_engine.linear import MOST_ROWS, RowLinear, SlicedWeight, use_row_linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 9, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("out_features", [10, 11])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_linear_it_replaces(dtype, rows, out_features, bias):
    torch.manual_seed(0)
    linear = nn.Linear(32, out_features, bias=bias).to(dtype)
    x = torch.randn(1, rows, 32).to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(RowLinear(linear)(x), linear(x), rtol=tolerance, atol=tolerance)


def test_a_row_that_is_a_view_is_read_through_its_strides():
    linear = nn.Linear(32, 10)
    x = torch.randn(4, 32, 3)[:, :, 1][2:3]
    torch.testing.assert_close(RowLinear(linear)(x), linear(x))


def test_every_linear_of_a_model_is_replaced_and_shares_its_weights():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))
    weight = model[0].weight
    use_row_linears(model)
    assert isinstance(model[0], RowLinear)
    assert isinstance(model[1][0], RowLinear)
    assert model[0].weight is weight


@pytest.mark.parametrize("rows", [1, 3])
def test_a_product_is_added_in_place(rows):
    weight, x, out = torch.randn(10, 32), torch.randn(rows, 32), torch.randn(10, rows)
    expected, sliced = out + weight @ x.t(), SlicedWeight(weight)
    sliced.add_product(sliced.slices(out), sliced.columns(x))
    torch.testing.assert_close(out, expected)
    sliced.product_into(sliced.slices(out), sliced.columns(x))
    torch.testing.assert_close(out, weight @ x.t())
    assert torch.equal(sliced.product(x), out)


@pytest.mark.parametrize(
    "weight", [torch.zeros(11, 32), torch.zeros(10, 32, dtype=torch.bfloat16)], ids=["odd", "bf16"]
)
def test_other_weights_are_refused(weight):
    with pytest.raises(ValueError, match="sliced"):
        SlicedWeight(weight)


def test_no_rows_give_none():
    """A step that only prefills wants no logits."""
    assert SlicedWeight(torch.randn(10, 32)).product(torch.empty(0, 32)).shape == (10, 0)
