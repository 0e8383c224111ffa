"""The seam between the runner and a model's weights: everything of a decoder layer but its attention.

`exllama` implements it over exllamav2's quantized matrices, `plain` over plain torch for tests and as reference.
Rows of a forward are independent of each other here, whatever sequences they belong to.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from service.engine.models.errors import ModelError


class DecoderModel(Protocol):
    """A decoder with its weights on a device. `scale`: of attention scores. `dtype`: of everything that goes in and
    out but the ids. `cheap_rows`: rows that take about as long as one, the weights being read once for all of them."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    scale: float
    dtype: torch.dtype
    device: torch.device

    @property
    def cheap_rows(self) -> int: ...

    def settle(self, row_counts: Iterable[int]) -> None:
        """Do now what the first forwards of these numbers of rows would do once, such as measuring kernels: nothing
        of it may happen while a forward is captured."""
        ...

    def rope(self, layer: int) -> tuple[Tensor, float]:
        """Inverse frequencies FP32 ``[head_dim / 2]`` on the device, zeros for a layer without positions, and the
        factor of cos and sin."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids int32 ``[R]`` to hidden states ``[R, hidden_size]``."""
        ...

    def qkv(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values ``[R, heads, head_dim]`` of hidden states, before RoPE: input norm, projections, and
        the norm of queries and keys where the architecture has one."""
        ...

    def attention_out(self, layer: int, attention: Tensor, x: Tensor) -> Tensor:
        """Hidden states after the output projection of ``[R, n_heads, head_dim]`` and the residual; may be `x` itself,
        changed in place."""
        ...

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """Hidden states after norm, MLP and residual; may be `x` itself, changed in place."""
        ...

    def head(self, x: Tensor) -> Tensor:
        """Logits ``[R, vocab_size]`` of the last layer's hidden states: final norm and head."""
        ...


class UnsupportedModel(ModelError):
    """This engine would compute the model wrongly; the message names the feature."""
