"""A linear layer that reads its weights at memory speed when there is one row.

The BLAS behind `torch.nn.functional.linear` reaches a third of the memory bandwidth for a single FP32 row on some
CPUs; a batched product over slices of the output features reaches nearly all of it (`benchmarks/decode_parts.py`).
"""

import torch
from torch import Tensor, nn

_SLICES = 2


class RowLinear(nn.Module):
    """Takes the place of an `nn.Linear`, sharing its parameters; the sums are those of a plain product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        out_features, in_features = linear.weight.shape
        self._sliceable = linear.weight.dtype is torch.float32 and out_features % _SLICES == 0
        self._slices = (_SLICES, out_features // _SLICES, in_features)

    def forward(self, x: Tensor) -> Tensor:
        if not self._sliceable or x.numel() != x.shape[-1] or x.device.type != "cpu":
            return nn.functional.linear(x, self.weight, self.bias)
        # The same column for every slice, its strides those of a column-major matrix: that is what takes the fast path.
        column = x.reshape(-1).contiguous().as_strided((_SLICES, x.shape[-1], 1), (0, 1, x.shape[-1]))
        out = torch.bmm(self.weight.view(self._slices), column).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def use_row_linears(model: nn.Module) -> None:
    """Replace every `nn.Linear` below `model` in place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, RowLinear(child))
