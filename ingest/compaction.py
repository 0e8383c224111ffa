"""Which rows of a document's KV stay as summary slots, and how many each layer gets: selection by replay scores.

Scores say how much a repetition of the document looks at each token (KVzip, Kim et al., 2025, arXiv 2505.23416;
`Runner.replay`). Every head of a layer keeps as many rows as the others, but rows of its own: attention kernels need no
change for that, since keys carry their positions. Pure tensor math: no model, no files.
"""

import torch
from torch import Tensor


def select_uniform(scores: Tensor, n_slots: int) -> Tensor:
    """The `n_slots` best tokens of every head: ``[layers, heads, n]`` -> int64 ``[layers, heads, n_slots]``, places
    among the n tokens, ascending in each head.

    Equal scores are decided for the earlier token, so that the same scores always give the same rows. Raises ValueError
    for another shape, for scores that are not finite, and when there are fewer than `n_slots` tokens.
    """
    _check(scores, n_slots)
    return _best(scores, n_slots)


def _best(scores: Tensor, n_slots: int) -> Tensor:
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[..., :n_slots].sort(-1).values


def _check(scores: Tensor, n_slots: int) -> None:
    if scores.dim() != 3:
        raise ValueError(f"scores of shape {tuple(scores.shape)} are not [layers, heads, tokens]")
    if not 0 <= n_slots <= scores.shape[-1]:
        raise ValueError(f"{n_slots} slots of {scores.shape[-1]} tokens")
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("scores are not finite")
