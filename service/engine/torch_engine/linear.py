"""A linear layer that reads its weights at memory speed when there are few rows.

The BLAS behind `torch.nn.functional.linear` reaches a fifth to a half of the memory bandwidth for up to eight FP32
rows on some CPUs; a batched product over slices of the output features reaches nearly all of it for one row, and twice
to three times as much for a few (`benchmarks/decode_parts.py`).
"""

import torch
from torch import Tensor, nn

_SLICES = (8, 2)
"""Numbers of slices to choose from: the first that divides the output features."""
_MOST_ROWS = 8


class RowLinear(nn.Module):
    """Takes the place of an `nn.Linear`, sharing its parameters; the sums are those of a plain product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        out_features, in_features = linear.weight.shape
        n = next((n for n in _SLICES if out_features % n == 0), 0)
        self._slices = (n, out_features // n, in_features) if n and linear.weight.dtype is torch.float32 else None

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        n_rows = x.numel() // width
        if self._slices is None or not 0 < n_rows <= _MOST_ROWS or x.device.type != "cpu":
            return nn.functional.linear(x, self.weight, self.bias)
        # The same rows for every slice, as the columns of a column-major matrix: that is what takes the fast path.
        columns = x.reshape(-1).contiguous().as_strided((self._slices[0], width, n_rows), (0, 1, width))
        out = torch.bmm(self.weight.view(self._slices), columns).view(-1, n_rows).t().reshape(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def use_row_linears(model: nn.Module) -> None:
    """Replace every `nn.Linear` below `model` in place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, RowLinear(child))
