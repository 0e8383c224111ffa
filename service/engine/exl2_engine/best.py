"""The best tokens of rows, found on the device: logits of a large vocabulary are megabytes, and a host looks through
them row by row while the card waits."""

import math

import torch
from torch import Tensor

from service.engine.protocol import Best


def best_of(logits: Tensor, *, how_sure: bool = False) -> list[Best]:
    """Of each row of FP32 logits ``[n, vocab]``; their probabilities only with `how_sure`. Waits for the step."""
    best, total = logits.argmax(-1), logits.sum(-1)
    sure = logits.softmax(-1).amax(-1) if how_sure else torch.zeros_like(total)
    found = torch.stack((best.double(), total.double(), sure.double())).tolist()  # ids below 2**53 stay whole
    return [Best(int(token_id), math.isfinite(of_row), p) for token_id, of_row, p in zip(*found, strict=True)]
