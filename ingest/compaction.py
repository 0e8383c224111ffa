"""Which rows of a document's KV stay as summary slots, and how many each layer gets: selection by replay scores.

Scores say how much a repetition of the document looks at each token (KVzip, Kim et al., 2025, arXiv 2505.23416;
`Runner.replay`). They are probabilities, so that heads can be compared: what serves answers is one threshold over all
heads of all layers, so that a head which finds things by their place keeps many rows and one which does not keeps few.
With equal numbers in every head little is left of answers beyond half of the rows (docs/fidelity.md). Pure tensor math:
no model, no files.
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


def select_ragged(scores: Tensor, n_slots: int) -> list[list[Tensor]]:
    """As many slots in all as `select_uniform` gives, but where the scores are highest over all heads of all layers:
    per layer and head int64 ``[own n_slots]``, ascending; a head may have none. Errors are those of `select_uniform`.

    Equal scores are decided for the earlier layer, then head, then token.
    """
    _check(scores, n_slots)
    flat = scores.flatten()
    n_kept = scores.shape[0] * scores.shape[1] * n_slots
    kept = torch.zeros(len(flat), dtype=torch.bool, device=scores.device)
    if n_kept:
        threshold = torch.kthvalue(flat, len(flat) - n_kept + 1).values
        above = flat > threshold
        level = (flat == threshold).nonzero()[:, 0]
        kept = above.index_fill(0, level[: n_kept - int(above.sum())], True)
    return [[head.nonzero()[:, 0] for head in layer] for layer in kept.view(scores.shape)]


def select_layered(scores: Tensor, n_slots: int, *, best_head: bool = False) -> list[Tensor]:
    """As many slots in all as `select_uniform` gives, but more of them to layers whose scores are high: per layer int64
    ``[heads, own n_slots]``, ascending in each head. Errors are those of `select_uniform`.

    The r-th best tokens of a layer's heads are kept or dropped together, by the mean of their scores, so that its heads
    stay equally long (composite tokens: KVCompose, Akulov et al., 2025, arXiv 2509.05165); with `best_head` by the
    largest of them, so that a layer with one retrieval head among others gets what that head needs.
    """
    _check(scores, n_slots)
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


def _check(scores: Tensor, n_slots: int) -> None:
    if scores.dim() != 3:
        raise ValueError(f"scores of shape {tuple(scores.shape)} are not [layers, heads, tokens]")
    if not 0 <= n_slots <= scores.shape[-1]:
        raise ValueError(f"{n_slots} slots of {scores.shape[-1]} tokens")
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("scores are not finite")
