"""A model as documents are prefilled with it: what is stored must come out the same each time, whatever else is set."""

from typing import Any

import torch
from torch import Tensor

from service.engine.exl2_engine.few_rows import FEW_ROWS


class DocumentModel:
    """A `DecoderModel` that multiplies few rows as it does many: with rows of zeros behind them.

    exllamav2 adds up the products of up to 32 rows in FP16 with atomics, in whatever order they arrive: a short last
    chunk of a document would differ from run to run, and a build that was interrupted from one that was not.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def qkv(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._model.qkv(layer, _padded(x))
        return q[: len(x)], k[: len(x)], v[: len(x)]

    def attention_out(self, layer: int, attention: Tensor, x: Tensor) -> Tensor:
        return self._model.attention_out(layer, _padded(attention), _padded(x))[: len(x)]

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        return self._model.mlp(layer, _padded(x))[: len(x)]


def _padded(x: Tensor) -> Tensor:
    """`x`, or few rows of it with zeros behind them; dense either way."""
    if len(x) > FEW_ROWS:
        return x
    return torch.cat((x, x.new_zeros(FEW_ROWS + 1 - len(x), *x.shape[1:])))
