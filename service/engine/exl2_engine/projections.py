"""Queries, keys and values as attention and storage take them."""

from torch import Tensor

from service.engine.exl2_engine.backend import KVBackend
from service.engine.exl2_engine.model import DecoderModel


def rotated_qkv(
    model: DecoderModel, backend: KVBackend, layer: int, x: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of hidden states ``[R, hidden_size]``: ``[R, heads, head_dim]`` each, after RoPE, in the codec's space."""
    q, k, v = model.qkv(layer, x)
    inv_freq, scaling = model.rope(layer)
    turn = backend.rope_and_rotate
    return turn(q, positions, inv_freq, scaling), turn(k, positions, inv_freq, scaling), backend.rotate(v)
