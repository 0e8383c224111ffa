"""Attention over a shared document and private tails, grouped heads, no repeating of keys or values.

Queries are rotated for quantized KV types and, but for `flash`, already scaled. Rows of one KV head are its query
heads times tokens: ``[n_kv_heads, group * n_rows, head_dim]``, group-major. Partial results over disjoint sets
of keys are merged by their log-sum-exp, as in flash-attention's split-KV (Dao et al., 2023).
"""

import math

import torch
from torch import Tensor

_CAUSAL_ROWS = 384


def grouped_scores(q: Tensor, k: Tensor) -> Tensor:
    """``q @ k^T`` in FP32: ``[h, rows, d] x [h, n, d] -> [h, rows, n]``."""
    return torch.bmm(q, k.transpose(1, 2))


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Output FP32 ``[h, rows, d]`` and log-sum-exp ``[h, rows]`` of many rows; memory linear in the rows.

    All three are taken to the dtype of `v`.
    """
    if v.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None].to(v.dtype), k[None].to(v.dtype), v[None], 0.0, causal, scale=scale
        )
        return out[0].float(), lse[0]
    return _plain(q * scale, k, v, causal=causal)


def causal_flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """A chunk over itself: queries ``[heads, n, d]``, keys and values ``[kv_heads, n, d]``.

    Gives output FP32 ``[heads, n, d]`` and log-sum-exp ``[heads, n]``. Long chunks are halved: the flash kernel's
    query blocks grow with the rows, and it computes whole blocks before it masks them.
    """
    n = q.shape[1]
    if n <= _CAUSAL_ROWS:
        group = q.shape[0] // k.shape[0]
        return flash(q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), scale, causal=True)
    half = n // 2
    early = causal_flash(q[:, :half], k[:, :half], v[:, :half], scale)
    late_q = q[:, half:]
    late = causal_flash(late_q, k[:, half:], v[:, half:], scale)
    past = flash(by_kv_head(late_q, k.shape[0]), k[:, :half], v[:, :half], scale)
    late = merge(*late, past[0].reshape(late[0].shape), past[1].reshape(late[1].shape))
    return torch.cat((early[0], late[0]), 1), torch.cat((early[1], late[1]), 1)


def by_kv_head(q: Tensor, kv_heads: int) -> Tensor:
    """``[heads, n, d] -> [kv_heads, group * n, d]``, group-major."""
    heads, n, d = q.shape
    return q.reshape(kv_heads, heads // kv_heads * n, d)


def _plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """As `flash`, a bounded number of keys at a time, on devices without that kernel."""
    out, lse = (
        torch.zeros_like(q, dtype=torch.float32),
        q.new_full(q.shape[:2], -math.inf, dtype=torch.float32),
    )
    step = max(256, 1 << 24 // max(1, q.shape[0] * q.shape[1]))
    for first in range(0, k.shape[1], step):
        scores = grouped_scores(q.float(), k[:, first : first + step].float())
        if causal:
            rows = torch.arange(q.shape[1], device=q.device)[:, None]
            keys = torch.arange(first, first + scores.shape[2], device=q.device)[None]
            scores.masked_fill_(keys > rows, -math.inf)
        part_lse = scores.logsumexp(-1)
        shift = part_lse.masked_fill(part_lse == -math.inf, 0.0)
        part = torch.bmm(torch.exp(scores - shift[..., None]), v[:, first : first + step].float())
        out, lse = merge(out, lse, part, part_lse)
    return out, lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint key sets. A side that saw no key has log-sum-exp -inf."""
    lse = torch.logaddexp(lse_a, lse_b)
    safe = lse.masked_fill(lse == -math.inf, 0.0)
    weight_a, weight_b = (torch.exp(x - safe)[..., None] for x in (lse_a, lse_b))
    return out_a * weight_a + out_b * weight_b, lse


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output FP32 and log-sum-exp over a short tail; `mask` is added to ``[h, group, rows, n]`` scores."""
    scores = grouped_scores(q, k)
    if mask is not None:
        h, rows, n = scores.shape
        scores.view(h, rows // mask.shape[0], mask.shape[0], n).add_(mask)
    lse = scores.logsumexp(-1)
    safe = lse.masked_fill(lse == -math.inf, 0.0)
    p = torch.exp(scores - safe[..., None])
    return torch.bmm(p.to(v.dtype), v).float(), lse


def causal_mask(n_rows: int, n_past: int, *, refeed: bool, device: torch.device) -> Tensor | None:
    """Additive mask ``[n_rows, n_past + new]`` of a tail; None when every row sees every key.

    With `refeed` the first row is a token of the document: it has no key in the tail and sees none there.
    """
    new = n_rows - refeed
    if n_rows == 1 and not refeed:
        return None
    rows = torch.arange(n_rows, device=device)[:, None] - int(refeed)
    keys = torch.arange(n_past + new, device=device)[None] - n_past
    hidden = keys > rows
    if refeed:
        hidden[0] = True
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -math.inf)
