"""Other ways to choose summary slots by scores than the product's (`ingest.compaction`), for the comparison with it."""

import torch
from torch import Tensor

from ingest.compaction import check_scores


def select_uniform(scores: Tensor, n_slots: int) -> Tensor:
    """The `n_slots` best tokens of every head: ``[layers, heads, n]`` -> int64 ``[layers, heads, n_slots]``, places
    among the n tokens, ascending in each head.

    Equal scores are decided for the earlier token, so that the same scores always give the same rows. Raises ValueError
    for another shape, for scores that are not finite, and when there are fewer than `n_slots` tokens.
    """
    check_scores(scores, n_slots)
    return _best(scores, n_slots)


def select_layered(scores: Tensor, n_slots: int, *, best_head: bool = False) -> list[Tensor]:
    """As many slots in all as `select_uniform` gives, but more of them to layers whose scores are high: per layer int64
    ``[heads, own n_slots]``, ascending in each head. Errors are those of `select_uniform`.

    The r-th best tokens of a layer's heads are kept or dropped together, by the mean of their scores, so that its heads
    stay equally long (composite tokens: KVCompose, Akulov et al., 2025, arXiv 2509.05165); with `best_head` by the
    largest of them, so that a layer with one retrieval head among others gets what that head needs.
    """
    check_scores(scores, n_slots)
    n_layers, _, n = scores.shape
    ranked = scores.sort(dim=-1, descending=True).values
    composites = ranked.amax(1) if best_head else ranked.mean(1)
    best = torch.sort(composites.flatten(), descending=True, stable=True).indices[: n_layers * n_slots]
    of_layer = torch.bincount(best // n, minlength=n_layers).tolist()
    return [_best(of_one, own) for of_one, own in zip(scores, of_layer, strict=True)]


def max_pool(scores: Tensor, reach: int) -> Tensor:
    """Each token's score becomes the largest within `reach` tokens on either side, so that neighbours are kept
    together; any shape ``[..., n]``."""
    pooled = torch.nn.functional.max_pool1d(scores.flatten(0, -2), 2 * reach + 1, stride=1, padding=reach)
    return pooled.view(scores.shape)


def _best(scores: Tensor, n_slots: int) -> Tensor:
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[..., :n_slots].sort(-1).values
