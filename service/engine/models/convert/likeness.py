"""How far converted weights predict otherwise than their source."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from service.engine.models.card import ModelCard
from service.engine.models.convert.record import REFUSE_KL, Likeness
from service.engine.models.errors import SourceRefused
from service.engine.models.gate import kl_stats

Predict = Callable[[Path, ModelCard, Sequence[Sequence[int]]], list[Tensor]]
"""Logits FP32 ``[tokens - first + 1, vocab]`` of each text, from after its first few tokens on (`SEEN_TOKENS`)."""

SEEN_TOKENS = 16
"""Of a text, before its predictions count: nothing is known of it before, and any model guesses."""


def compare(references: Sequence[Tensor], found: Sequence[Tensor], texts: Sequence[Sequence[int]]) -> Likeness:
    """`references` are the source's logits after every token of each text, `found` those of the converted weights after
    the `SEEN_TOKENS`-th and each later one. Raises ValueError for logits that are not finite or of another shape."""
    kept = [logits[SEEN_TOKENS - 1 :].float() for logits in references]
    stats = kl_stats(torch.cat(kept), torch.cat(list(found)))
    return Likeness(
        mean_kl=stats.mean,
        p99_kl=stats.p99,
        top1_agreement=stats.top1_agreement,
        perplexity=perplexity(found, texts),
        source_perplexity=perplexity(kept, texts),
        n_positions=stats.n_positions,
    )


def perplexity(logits: Sequence[Tensor], texts: Sequence[Sequence[int]]) -> float:
    """exp of the mean log-loss (nats) of each text's tokens behind the seen ones."""
    losses = [
        torch.nn.functional.cross_entropy(rows[:-1].float(), torch.tensor(ids[SEEN_TOKENS:]), reduction="none")
        for rows, ids in zip(logits, texts, strict=True)
    ]
    return math.exp(float(torch.cat(losses).double().mean()))


def check_likeness(likeness: Likeness, most_kl: float = REFUSE_KL) -> None:
    """Raises SourceRefused when the predictions differ too much."""
    if not likeness.mean_kl <= most_kl:
        raise SourceRefused(
            f"the converted weights predict otherwise than their source by a mean KL of {likeness.mean_kl:.3f} nats, "
            f"above the limit of {most_kl:g}: give more bits, or take it as it is with --most-kl "
            f"{likeness.mean_kl + 0.01:.2f}"
        )
