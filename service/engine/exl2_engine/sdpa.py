"""Attention that gives its log-sum-exp, from the fused kernels torch brings along, and which of them work here.

Shapes: queries ``[heads, rows, head_dim]``, keys and values ``[kv_heads, tokens, head_dim]``. A result's output is
``[heads, rows, head_dim]`` in the dtype of the queries (FP32 from `PLAIN`), with any strides, and its log-sum-exp
(natural logarithm) FP32 ``[heads, rows]``.
"""

import math
from enum import StrEnum
from functools import lru_cache

import torch
from torch import Tensor

from service.engine.torch_engine import attention

_aten = torch.ops.aten


class Method(StrEnum):
    """A way to compute attention, the fastest on Hopper first."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    PLAIN = "plain"


def attend(method: Method, q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of queries to keys of as many heads; `causal`: row i sees the tokens up to i."""
    if method is Method.PLAIN:
        q, k, v = (x if x.device.type == "cpu" else x.float() for x in (q, k, v))
        return attention.flash(q, k, v, scale, causal=causal)
    q4, k4, v4 = q[None], k[None], v[None]
    if method is Method.FLASH:
        out, lse = _aten._scaled_dot_product_flash_attention(q4, k4, v4, 0.0, causal, scale=scale)[:2]
    elif method is Method.CUDNN:
        out, lse = _aten._scaled_dot_product_cudnn_attention(q4, k4, v4, None, True, 0.0, causal, scale=scale)[:2]
    else:
        out, lse = _aten._scaled_dot_product_efficient_attention(q4, k4, v4, None, True, 0.0, causal, scale=scale)[:2]
    # cuDNN may add a last dim of 1; the efficient kernel rounds the rows up to a multiple of 32.
    return out[0], lse.reshape(q.shape[0], -1)[:, : q.shape[1]]


def works(method: Method, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a small case runs and gives the right output and log-sum-exp, with and without a causal mask."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 64, head_dim, generator=generator).to(device, dtype) for _ in range(3))
    for causal in (False, True):
        try:
            out, lse = attend(method, q, k, v, head_dim**-0.5, causal=causal)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return False
        if not agrees(out, lse, *exact(q, k, v, head_dim**-0.5, causal=causal)):
            return False
    return True


def agrees(out: Tensor, lse: Tensor, true_out: Tensor, true_lse: Tensor, tolerance: float = 2e-3) -> bool:
    """Whether output and log-sum-exp are within a relative error (of the whole) of the true ones."""
    error = (out.to(true_out) - true_out).norm() / true_out.norm()
    return bool(error < tolerance) and bool((lse.to(true_lse) - true_lse).abs().max() < tolerance)


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp in FP64, of all scores at once: for comparisons. `causal`: the rows are the last of
    the tokens."""
    scores = q.double() @ k.double().transpose(1, 2) * scale
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + k.shape[1] - q.shape[1])
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, -1) @ v.double(), scores.logsumexp(-1)


@lru_cache(maxsize=64)
def best(device: torch.device, dtype: torch.dtype, head_dim: int) -> Method:
    """The first method that works on this device, the order depending on its generation."""
    if device.type != "cuda":
        return Method.PLAIN
    order = [Method.CUDNN, Method.FLASH, Method.EFFICIENT]
    if torch.cuda.get_device_capability(device) < (9, 0):
        order = [Method.FLASH, Method.EFFICIENT] if torch.cuda.get_device_capability(device) >= (8, 0) else order[2:]
    return next((m for m in order if works(m, device, dtype, head_dim)), Method.PLAIN)
