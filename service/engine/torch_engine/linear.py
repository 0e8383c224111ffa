"""Products of few rows with weights, at memory speed.

The BLAS behind `torch.nn.functional.linear` reads weights at a fifth to a half of the memory bandwidth for up to eight
FP32 rows on some CPUs, in one thread for one row. A batched product over slices of the output features reaches most of
it for one row, and 1.3 to 3 times as much as `linear` for up to 64 (`benchmarks/decode_parts.py`).
"""

import torch
from torch import Tensor, nn

MOST_ROWS = 64
"""Up to this many rows the sliced product is the faster one."""

_SLICES = (8, 2)
"""Numbers of slices to choose from: the first that divides the output features."""


class SlicedWeight:
    """A weight ``[out, in]`` for products with up to `MOST_ROWS` rows; it shares the memory."""

    __slots__ = ("_shape", "_sliced", "weight")

    def __init__(self, weight: Tensor) -> None:
        """Raises ValueError for a weight that `fits` says no to."""
        if not fits(weight):
            raise ValueError(f"a weight of {tuple(weight.shape)} on {weight.device} is not for sliced products")
        out_features, in_features = weight.shape
        n = next(n for n in _SLICES if out_features % n == 0)
        self.weight = weight
        self._shape = (n, out_features // n, in_features)
        self._sliced = weight.view(self._shape)

    def product(self, x: Tensor) -> Tensor:
        """``[n, in] -> [out, n]``."""
        return torch.bmm(self._sliced, self.columns(x)).view(len(self.weight), len(x))

    def columns(self, x: Tensor) -> Tensor:
        """What `product_into` and `add_product` multiply: ``[n, in]`` once for every slice. A view of a contiguous `x`.

        As the columns of a column-major matrix: that is what takes the fast path.
        """
        n, width = x.shape
        return x.contiguous().as_strided((self._shape[0], width, n), (0, 1, width))

    def slices(self, out: Tensor) -> Tensor:
        """How `product_into` and `add_product` see ``[out, n]``, contiguous."""
        return out.view(*self._shape[:2], -1)

    def product_into(self, slices: Tensor, columns: Tensor) -> None:
        torch.bmm(self._sliced, columns, out=slices)

    def add_product(self, slices: Tensor, columns: Tensor) -> None:
        slices.baddbmm_(self._sliced, columns)


def fits(weight: Tensor) -> bool:
    """Whether a weight is one for sliced products: FP32, on a CPU, of an even number of output features."""
    return weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.shape[0] % min(_SLICES) == 0


class RowLinear(nn.Module):
    """Takes the place of an `nn.Linear`, sharing its parameters; the sums are those of a plain product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        n_rows = x.numel() // width
        if not 0 < n_rows <= MOST_ROWS or not fits(self.weight):
            return nn.functional.linear(x, self.weight, self.bias)
        rows = x.reshape(n_rows, width)
        out = SlicedWeight(self.weight).product(rows).t().reshape(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def use_row_linears(model: nn.Module) -> None:
    """Replace every `nn.Linear` below `model` in place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, RowLinear(child))
