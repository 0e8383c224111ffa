"""Which rows of a document's KV stay as summary slots, and how many each layer gets: selection by replay scores.

Scores say how much a repetition of the document looks at each token (KVzip, Kim et al., 2025, arXiv 2505.23416;
`Runner.replay`). They are probabilities, so that heads can be compared: what serves answers is one threshold over all
heads of all layers, so that a head which finds things by their place keeps many rows and one which does not keeps few.
With equal numbers in every head little is left of answers beyond half of the rows (docs/fidelity.md). Pure tensor math:
no model, no files.
"""

import torch
from torch import Tensor


def select_ragged(scores: Tensor, n_slots: int) -> list[list[Tensor]]:
    """The rows where scores ``[layers, heads, n]`` are highest over all heads of all layers, `n_slots` for each head in
    all: per layer and head int64 ``[own n_slots]``, places among the n tokens, ascending; a head may have none.

    Equal scores are decided for the earlier layer, then head, then token, so that the same scores always give the same
    rows. Raises ValueError for another shape, for scores that are not finite, and when there are fewer than `n_slots`
    tokens.
    """
    check_scores(scores, n_slots)
    flat = scores.flatten()
    n_kept = scores.shape[0] * scores.shape[1] * n_slots
    kept = torch.zeros(len(flat), dtype=torch.bool, device=scores.device)
    if n_kept:
        threshold = torch.kthvalue(flat, len(flat) - n_kept + 1).values
        above = flat > threshold
        level = (flat == threshold).nonzero()[:, 0]
        kept = above.index_fill(0, level[: n_kept - int(above.sum())], True)
    return [[head.nonzero()[:, 0] for head in layer] for layer in kept.view(scores.shape)]


def check_scores(scores: Tensor, n_slots: int) -> None:
    """Raises ValueError unless `n_slots` rows for each head can be chosen by them."""
    if scores.dim() != 3:
        raise ValueError(f"scores of shape {tuple(scores.shape)} are not [layers, heads, tokens]")
    if not 0 <= n_slots <= scores.shape[-1]:
        raise ValueError(f"{n_slots} slots of {scores.shape[-1]} tokens")
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("scores are not finite")
