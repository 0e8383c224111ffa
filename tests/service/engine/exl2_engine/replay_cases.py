"""Rows over keys that were decoded, and over themselves, in FP64."""

import torch

from cache_store.codec import rotate
from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.replay import MORE_DIMS
from tests.service.engine.exl2_engine.prefill_cases import random

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]


def rows_over(layout: KVLayout, n: int, heads: int, lengths: list[int], dtype, device="cpu") -> Case:
    """Queries, keys and values ``[n, heads, d]``, and decoded ones before them, of these lengths, not dense: keys and
    values of a head do not follow those of the head before."""
    kv_heads, d = layout.n_kv_heads, layout.head_dim
    shapes = ((n, heads, d), (n, kv_heads, d), (n, kv_heads, d))
    q, k, v = (random(*shape, seed=i, dtype=dtype, device=device) for i, shape in enumerate(shapes))
    before = []
    for i, length in enumerate(lengths):
        wide = random(2, kv_heads, length + 56, d, seed=10 + i, dtype=dtype, device=device)
        before.append((wide[0, :, 56:], wide[1, :, 56:]))
    return q, k, v, before


def exact_over(layout: KVLayout, case: Case, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP64: the output ``[n, heads, d]`` transformed back, the log-sum-exp ``[kv_heads, group, n]``, and the largest
    probability of each key of the first part ``[kv_heads, length]``."""
    q, k, v, before = case
    n, kv_heads = len(q), layout.n_kv_heads
    queries = q.double().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    keys, values = (
        torch.cat([*(part[i].double() for part in before), own.double().transpose(0, 1)], 1)
        for i, own in enumerate((k, v))
    )
    scores = queries @ keys[:, None].transpose(2, 3) * scale
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    scores[..., keys.shape[1] - n :].masked_fill_(hidden, -torch.inf)
    p = scores.softmax(-1)
    out = (p @ values[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
    out = out if layout.kv_type is KVType.FP16 else rotate(out.float()).double()
    return out, scores.logsumexp(-1), p[..., : before[0][0].shape[1]].amax((1, 2))


def wide_keys(keys: torch.Tensor) -> torch.Tensor:
    """Keys ``[kv_heads, n, d]`` with the dims for the log-sum-exp, as `replay.SeenTokens.keys` gives them."""
    more = torch.zeros((*keys.shape[:2], MORE_DIMS), dtype=keys.dtype, device=keys.device)
    more[..., :2] = 64.0
    return torch.cat((keys, more), -1)
