import pytest
import torch
from torch import nn

from service.engine.torch_engine.linear import RowLinear, use_row_linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 9])
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
